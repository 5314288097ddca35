"""Checkpoints: a decoder as a Hugging Face folder in the family's own tensor names, and as the state that is published.

On disk experts are single matrices and gate and up apart, as DeepSeek-V3 ships them; in memory they are stacked. Floating
point is BF16 or FP32 outside, whatever the decoder holds inside. Knows nothing of optimizers, shards or versions.
DESIGN decisions 7, 8 and 15.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from etude.model.config import ModelConfig
from etude.model.decoder import Decoder
from etude.records.errors import BadInput, CheckpointError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_BIAS = "e_score_correction_bias"
_CHECKPOINT_SUFFIXES = (".json", ".jinja", ".md", ".model", ".safetensors", ".txt")
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True)
class _Entry:
    """One tensor of the checkpoint and where it lives in the decoder."""

    name: str
    shape: tuple[int, ...]
    source: str
    """Name of the decoder's parameter or buffer."""
    expert: int | None = None
    rows: tuple[int, int] | None = None
    """Rows of the expert's stacked matrix."""

    @property
    def keeps_fp32(self) -> bool:
        return self.source.endswith(_BIAS)

    def part(self, whole: Tensor) -> Tensor:
        if self.expert is None or self.rows is None:
            return whole
        return whole[self.expert, self.rows[0] : self.rows[1]]


def hf_names(
    config: ModelConfig, dtype: torch.dtype = torch.bfloat16
) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """(name, shape, dtype) of every tensor of `hf_state`, in its order, without building a decoder."""
    return [(entry.name, entry.shape, torch.float32 if entry.keeps_fp32 else dtype) for entry in _entries(config)]


@torch.no_grad()
def hf_state(decoder: Decoder, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The decoder's tensors under their checkpoint names, rounded to `dtype` (router biases stay float32).

    A snapshot: nothing in it shares memory with the decoder; experts of one layer are contiguous views of one tensor. A tied
    head is not repeated.
    """
    held = _held(decoder)
    copies: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    for entry in _entries(decoder.config):
        if entry.source not in copies:
            target = torch.float32 if entry.keeps_fp32 else dtype
            copies[entry.source] = held[entry.source].detach().to(target, copy=True)
        state[entry.name] = entry.part(copies[entry.source])
    return state


@torch.no_grad()
def load_hf_state_(decoder: Decoder, state: Mapping[str, Tensor], place: str = "state") -> None:
    """Copy a checkpoint state into the decoder, in place.

    Raises `CheckpointError` with `place` and the tensor's name, before anything is changed, when a name is missing or
    unknown, a shape differs, or a dtype is neither BF16 nor FP32.
    """
    entries = _entries(decoder.config)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    _check_names(entries, shapes, {name: place for name in shapes}, place)
    held = _held(decoder)
    for entry in entries:
        entry.part(held[entry.source]).copy_(state[entry.name])


def read_config(folder: str | Path) -> ModelConfig:
    """The `ModelConfig` of a checkpoint folder; `CheckpointError` when it is missing or unusable."""
    return _read_config(Path(folder))[0]


def save_pretrained(
    decoder: Decoder,
    folder: str | Path,
    tokenizer_files: Mapping[str, bytes] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write `config.json`, `model.safetensors` and `tokenizer_files` (name -> content) as a Hugging Face folder.

    Everything is written and synced beside the target first, then renamed into place; an older checkpoint there is
    replaced. Equal weights give equal bytes. Raises `CheckpointError` when the target holds something else or cannot be
    written; nothing half-written stays.
    """
    target = Path(folder).absolute()
    if target.exists() and not _replaceable(target):
        raise CheckpointError(str(target), "folder", "something else", "a new or empty folder or an older checkpoint")
    described = decoder.config.to_hf() | {"dtype": str(dtype).removeprefix("torch.")}
    texts = {CONFIG_FILE: json.dumps(described, indent=2, sort_keys=True).encode() + b"\n"}
    for name, content in (tokenizer_files or {}).items():
        if Path(name).name != name or name in (CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE):
            raise CheckpointError(
                str(target), "tokenizer_files", name, "plain names other than the weights' and config's"
            )
        texts[name] = content
    # Views of one stacked tensor become tensors of their own: the writer refuses shared storage.
    tensors = {name: tensor.clone() for name, tensor in hf_state(decoder, dtype).items()}
    staging: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
        os.chmod(staging, 0o755)
        save_file(tensors, staging / WEIGHTS_FILE, metadata={"format": "pt"})
        os.chmod(staging / WEIGHTS_FILE, 0o644)
        for name, content in texts.items():
            (staging / name).write_bytes(content)
        for path in (*staging.iterdir(), staging):
            _sync(path)
        _rename_over(staging, target)
        _sync(target.parent)
    except (OSError, SafetensorError) as error:
        size = sum(tensor.nbytes for tensor in tensors.values()) >> 20
        raise CheckpointError(str(target), "write", str(error), f"a writable place with {size + 1} MiB free") from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def load_pretrained(folder: str | Path) -> Decoder:
    """Read a Hugging Face folder (one file or shards with an index; BF16 or FP32) into a float32 decoder on the CPU.

    Strict: every tensor of the architecture must be there, with its shape, finite, and none besides except the layers of
    multi-token prediction that the config announces. Raises `CheckpointError` naming file and tensor, `Unsupported` for an
    architecture feature that the decoder lacks.
    """
    root = Path(folder)
    config, extra_layers = _read_config(root)
    skipped = tuple(f"model.layers.{config.num_hidden_layers + i}." for i in range(extra_layers))
    files = _weight_files(root)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    places: dict[str, str] = {}
    for path, wanted in files.items():
        with _opened(path) as reader:
            present = set(reader.keys())
            for name in sorted(present if wanted is None else wanted):
                if name.startswith(skipped) and skipped:
                    continue
                if name not in present:
                    raise CheckpointError(str(path), name, "missing", f"the tensor that {INDEX_FILE} places here")
                header = reader.get_slice(name)
                dtype = _DTYPES.get(header.get_dtype())
                if dtype is None:
                    raise CheckpointError(str(path), f"{name}.dtype", header.get_dtype(), "BF16 or F32")
                shapes[name], places[name] = (tuple(header.get_shape()), dtype), str(path)
    entries = _entries(config)
    _check_names(entries, shapes, places, str(root))
    decoder = Decoder(config)
    held = _held(decoder)
    by_name = {entry.name: entry for entry in entries}
    for path in files:
        with _opened(path) as reader, torch.no_grad():
            for name in (name for name, place in places.items() if place == str(path)):
                tensor = reader.get_tensor(name)
                if not bool(torch.isfinite(tensor).all()):
                    raise CheckpointError(str(path), name, "not finite", "numbers without NaN or infinity")
                by_name[name].part(held[by_name[name].source]).copy_(tensor)
    return decoder


@lru_cache(maxsize=16)
def _entries(config: ModelConfig) -> tuple[_Entry, ...]:
    return tuple(_list_entries(config))


def _list_entries(config: ModelConfig) -> Iterator[_Entry]:
    width, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank

    def plain(source: str, *shape: int) -> _Entry:
        return _Entry(source if source.startswith("lm_head") else f"model.{source}", shape, source)

    def swiglu(prefix: str, inner: int) -> Iterator[_Entry]:
        yield plain(f"{prefix}.gate_proj.weight", inner, width)
        yield plain(f"{prefix}.up_proj.weight", inner, width)
        yield plain(f"{prefix}.down_proj.weight", width, inner)

    yield plain("embed_tokens.weight", config.vocab_size, width)
    for layer in range(config.num_hidden_layers):
        block = f"layers.{layer}"
        yield plain(f"{block}.input_layernorm.weight", width)
        attention = f"{block}.self_attn"
        if config.q_lora_rank is None:
            yield plain(f"{attention}.q_proj.weight", heads * config.qk_head_dim, width)
        else:
            yield plain(f"{attention}.q_a_proj.weight", config.q_lora_rank, width)
            yield plain(f"{attention}.q_a_layernorm.weight", config.q_lora_rank)
            yield plain(f"{attention}.q_b_proj.weight", heads * config.qk_head_dim, config.q_lora_rank)
        yield plain(f"{attention}.kv_a_proj_with_mqa.weight", latent + config.qk_rope_head_dim, width)
        yield plain(f"{attention}.kv_a_layernorm.weight", latent)
        yield plain(f"{attention}.kv_b_proj.weight", heads * (config.qk_nope_head_dim + config.v_head_dim), latent)
        yield plain(f"{attention}.o_proj.weight", width, heads * config.v_head_dim)
        yield plain(f"{block}.post_attention_layernorm.weight", width)
        mlp = f"{block}.mlp"
        if layer < config.first_k_dense_replace:
            yield from swiglu(mlp, config.intermediate_size)
            continue
        yield plain(f"{mlp}.gate.weight", config.n_routed_experts, width)
        yield plain(f"{mlp}.gate.{_BIAS}", config.n_routed_experts)
        inner = config.moe_intermediate_size
        for expert in range(config.n_routed_experts):
            named, stacked = f"model.{mlp}.experts.{expert}", f"{mlp}.experts"
            yield _Entry(f"{named}.gate_proj.weight", (inner, width), f"{stacked}.gate_up_proj", expert, (0, inner))
            yield _Entry(
                f"{named}.up_proj.weight", (inner, width), f"{stacked}.gate_up_proj", expert, (inner, 2 * inner)
            )
            yield _Entry(f"{named}.down_proj.weight", (width, inner), f"{stacked}.down_proj", expert, (0, width))
        yield from swiglu(f"{mlp}.shared_experts", inner * config.n_shared_experts)
    yield plain("norm.weight", width)
    if not config.tie_word_embeddings:
        yield plain("lm_head.weight", config.vocab_size, width)


def _held(decoder: Decoder) -> dict[str, Tensor]:
    return dict(decoder.named_parameters()) | {
        name: buffer for name, buffer in decoder.named_buffers() if _BIAS in name
    }


def _check_names(
    entries: tuple[_Entry, ...],
    found: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    places: Mapping[str, str],
    place: str,
) -> None:
    for entry in entries:
        if entry.name not in found:
            raise CheckpointError(place, entry.name, "missing", f"a tensor of shape {entry.shape}")
        shape, dtype = found[entry.name]
        if shape != entry.shape:
            raise CheckpointError(places[entry.name], f"{entry.name}.shape", shape, f"{entry.shape}, from the config")
        if dtype not in _DTYPES.values():
            raise CheckpointError(places[entry.name], f"{entry.name}.dtype", dtype, "BF16 or F32")
    if len(found) > len(entries):
        name = sorted(set(found) - {entry.name for entry in entries})[0]
        raise CheckpointError(places[name], name, "present", "no tensor of this name in the architecture")


def _read_config(root: Path) -> tuple[ModelConfig, int]:
    path = root / CONFIG_FILE
    if not root.is_dir():
        raise CheckpointError(str(root), "folder", "missing", f"a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    raw = _read_json(path)
    extra = raw.get("num_nextn_predict_layers") or 0
    if not isinstance(extra, int) or extra < 0:
        raise CheckpointError(str(path), "num_nextn_predict_layers", extra, "an integer of 0 or more")
    try:
        return ModelConfig.from_hf(raw, place=str(path)), extra
    except BadInput as error:
        raise CheckpointError(error.place, error.field, error.value, error.expected) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(str(path), "file", error.strerror or "unreadable", "a readable JSON file") from None
    except ValueError as error:
        raise CheckpointError(str(path), "JSON", str(error), "a JSON object") from None
    if not isinstance(raw, dict):
        raise CheckpointError(str(path), "JSON", type(raw).__name__, "a JSON object")
    return raw


def _weight_files(root: Path) -> dict[Path, list[str] | None]:
    """Files to read, each with the tensors that the index places there (None: all that it holds)."""
    if (root / WEIGHTS_FILE).exists():
        return {root / WEIGHTS_FILE: None}
    index = root / INDEX_FILE
    if not index.exists():
        raise CheckpointError(str(root), WEIGHTS_FILE, "missing", f"{WEIGHTS_FILE}, or {INDEX_FILE} with its shards")
    placed = _read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(str(index), "weight_map", placed, "an object from tensor name to file name")
    files: dict[Path, list[str] | None] = {}
    for name, file in placed.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(str(index), f"weight_map[{name}]", file, "the plain name of a file in the folder")
        names = files.setdefault(root / file, [])
        assert names is not None
        names.append(name)
    return files


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as reader:
            yield reader
    except (OSError, SafetensorError) as error:
        missing = "missing" if not path.exists() else str(error)
        raise CheckpointError(str(path), "safetensors", missing, "a complete safetensors file") from None


def _replaceable(target: Path) -> bool:
    """Whether the folder holds nothing that a checkpoint folder would not: a project's own folder must never be removed."""
    if not target.is_dir() or target.is_symlink():
        return False
    held = list(target.iterdir())
    known = all(path.is_file() and path.suffix in _CHECKPOINT_SUFFIXES for path in held)
    return not held or (known and any(path.name in (CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE) for path in held))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename_over(staging: Path, target: Path) -> None:
    if not target.exists():
        staging.rename(target)
        return
    # A folder cannot be renamed over a full one: the old checkpoint steps aside and comes back if the new one fails.
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    target.rename(aside / target.name)
    try:
        staging.rename(target)
    except OSError:
        (aside / target.name).rename(target)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
