"""The trainer process: owns the policy trainer and the publisher; one method a message of the run loop.

Synchronous on purpose: Ray runs it as an actor with a few threads, so that waiting for a commit never holds up a step.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from etude.coordinator.messages import Published, StepReport
from etude.model.checkpoint import load_pretrained, save_pretrained
from etude.records.errors import IntegrityError
from etude.records.rollout import decode_group
from etude.trainer.config import TrainerConfig
from etude.trainer.sequence import group_sequences
from etude.trainer.step import PolicyTrainer
from etude.weightsync.chain import Manifest, manifest_key
from etude.weightsync.config import WeightSyncConfig
from etude.weightsync.digests import root_digest
from etude.weightsync.publisher import Publisher, PublishTicket
from etude.weightsync.store import open_store


class TrainerService:
    """Holds the policy of one run. `model` is the folder it starts from, which is also the KL reference."""

    def __init__(
        self,
        *,
        model: str,
        trainer: TrainerConfig,
        weightsync: WeightSyncConfig,
        store: str,
        run_prefix: str,
        incarnation: int,
    ) -> None:
        torch.set_num_threads(trainer.threads or 1)
        self._model = model
        self._trainer = PolicyTrainer(load_pretrained(model), trainer)
        self._prefix, self._incarnation = run_prefix, incarnation
        self._publisher = Publisher(
            open_store(store),
            run_prefix,
            weightsync.anchor_every,
            part_bytes=weightsync.part_bytes,
            put_attempts=weightsync.put_attempts,
        )
        self._tickets: dict[int, tuple[PublishTicket, str, float]] = {}

    def _publish(self, policy_version: int) -> str:
        tensors = self._trainer.published_state()
        digest = root_digest(tensors)
        ticket = self._publisher.publish(policy_version, self._trainer.steps_done, self._incarnation, tensors)
        self._tickets[policy_version] = (ticket, digest, time.monotonic())
        return digest

    def publish_first(self) -> bytes:
        """Version 0, committed. Returns an encoded `Published`."""
        self._publish(0)
        return self.published(0)

    def published(self, policy_version: int) -> bytes:
        """Waits for the commit of a version that was published. Returns an encoded `Published`."""
        ticket, digest, began = self._tickets.pop(policy_version)
        manifest: Manifest = self._publisher.wait(ticket)
        if manifest.policy_version == policy_version and manifest.root_digest != digest:
            raise IntegrityError(
                f"version {policy_version}: published digest {manifest.root_digest[:12]} is not the trainer's {digest[:12]}"
            )
        return msgspec.msgpack.encode(
            Published(
                policy_version=manifest.policy_version,
                step=manifest.step,
                manifest_key=manifest_key(self._prefix, manifest.policy_version),
                digest=manifest.root_digest,
                delta_bytes=manifest.bytes_moved,
                seconds=time.monotonic() - began,
            )
        )

    def step(self, groups: Sequence[bytes], blobs: dict[str, bytes], policy_version: int) -> bytes:
        """One optimiser step on sealed groups, then the publish in the background. Returns an encoded `StepReport`."""

        def read_blob(digest: str) -> bytes:
            data = blobs.get(digest)
            if data is None or hashlib.sha256(data).hexdigest() != digest:
                state = "missing" if data is None else "not what its name says"
                raise IntegrityError(f"array {digest[:12]} of a group is {state}")
            return data

        sequences = [group_sequences(decode_group(data), read_blob) for data in groups]
        stats = self._trainer.step(sequences)
        digest = self._publish(policy_version)
        figures = {
            name: float(value)
            for name, value in msgspec.structs.asdict(stats).items()
            if isinstance(value, int | float) and value is not None
        }
        return msgspec.msgpack.encode(
            StepReport(step=stats.step, policy_version=policy_version, digest=digest, figures=figures)
        )

    def save(self, folder: str) -> None:
        """Writes the policy as a Hugging Face folder with the starting model's tokenizer files, atomically."""
        files = {p.name: p.read_bytes() for p in Path(self._model).iterdir() if p.name.startswith("tokenizer")}
        save_pretrained(self._trainer.decoder, folder, tokenizer_files=files)

    def close(self) -> None:
        """Finishes what was published."""
        self._publisher.close()
