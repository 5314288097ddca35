"""The trainer's state on disk: masters, Adam's moments, step, generator; whole or not there (SPEC S4, step checkpoints).

A checkpoint is a folder `step-<n>` that appears by one rename after its files are synced, so a process killed at any
moment leaves the older ones intact. Knows nothing of what the tensors mean; the trainer checks names and shapes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from etude.records.errors import CheckpointError

CHECKPOINT_VERSION = 1
_TENSORS, _META = "state.safetensors", "state.json"
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class TrainerState:
    """Steps done, tensors by name (`master/...`, `adam.exp_avg/...`, `rng/torch`), digest of the KL reference."""

    steps_done: int
    tensors: dict[str, Tensor]
    reference_digest: str


class _Meta(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    steps_done: int
    reference_digest: str
    sha256: str
    size: int


def save_checkpoint(root: str | Path, state: TrainerState) -> Path:
    """Writes `root/step-<n>` and returns it, in place of one that an earlier incarnation left there.

    Raises CheckpointError when the folder cannot be written (a full disk, no rights); nothing half-written stays.
    """
    root = Path(root)
    final = root / f"step-{state.steps_done:08d}"
    data = save_tensors({name: tensor.contiguous() for name, tensor in state.tensors.items()})
    meta = _Meta(
        version=CHECKPOINT_VERSION,
        steps_done=state.steps_done,
        reference_digest=state.reference_digest,
        sha256=hashlib.sha256(data).hexdigest(),
        size=len(data),
    )
    working: str | None = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        working = tempfile.mkdtemp(prefix=".partial-", dir=root)
        _write(Path(working) / _TENSORS, data)
        _write(Path(working) / _META, msgspec.json.encode(meta))
        _sync_folder(working)
        if final.exists():
            # killed here, the run still has the checkpoint that it resumed from: pruning comes after a save
            os.rename(final, tempfile.mkdtemp(prefix=".partial-", dir=root))
        os.rename(working, final)
        working = None
        _sync_folder(root)
    except OSError as error:
        raise CheckpointError(str(final), "folder", str(error), "a place that can be written") from error
    finally:
        if working is not None:
            shutil.rmtree(working, ignore_errors=True)
    return final


def load_checkpoint(folder: str | Path) -> TrainerState:
    """Reads a `step-<n>` folder. Raises CheckpointError naming the file when it is missing, cut or not what was saved."""
    folder = Path(folder)
    meta = _read_meta(folder / _META)
    path = folder / _TENSORS
    data = _read(path)
    if len(data) != meta.size or hashlib.sha256(data).hexdigest() != meta.sha256:
        raise CheckpointError(
            str(path), "content", f"{len(data)} bytes", f"{meta.size} bytes with sha256 {meta.sha256}"
        )
    try:
        tensors = load_tensors(data)
    except SafetensorError as error:
        raise CheckpointError(str(path), "content", str(error), "a safetensors file") from error
    return TrainerState(meta.steps_done, tensors, meta.reference_digest)


def list_checkpoints(root: str | Path) -> tuple[Path, ...]:
    """Complete checkpoints under `root`, oldest first; half-written ones have other names and are not listed."""
    root = Path(root)
    if not root.is_dir():
        return ()
    return tuple(sorted(path for path in root.iterdir() if _NAME.fullmatch(path.name)))


def latest_checkpoint(root: str | Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = list_checkpoints(root)
    return found[-1] if found else None


def prune_checkpoints(root: str | Path, keep: int) -> None:
    """Deletes all but the newest `keep` (>= 1), and what killed writers left behind.

    Only the one writer of `root` may call it, after its own save.
    """
    if keep < 1:
        raise CheckpointError(str(root), "keep", keep, "at least 1")
    for path in list_checkpoints(root)[:-keep]:
        # renamed first: a checkpoint is listed whole or not at all
        doomed = path.with_name(f".partial-{path.name}")
        os.rename(path, doomed)
    for path in Path(root).glob(".partial-*"):
        shutil.rmtree(path, ignore_errors=True)


def _read_meta(path: Path) -> _Meta:
    try:
        meta = msgspec.json.decode(_read(path), type=_Meta)
    except msgspec.DecodeError as error:
        raise CheckpointError(str(path), "content", str(error), "a trainer checkpoint's record") from error
    if meta.version != CHECKPOINT_VERSION:
        raise CheckpointError(str(path), "version", meta.version, f"checkpoint version {CHECKPOINT_VERSION}")
    return meta


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(str(path), "file", error.strerror, "a file of a trainer checkpoint") from error


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: str | Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
