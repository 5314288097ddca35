"""The receiver: rebuilds a version from the chain, and gives it out only when every byte is verified.

It goes on from the version it holds, else from the newest anchor below the wanted one. Damage (a missing, torn or flipped
object, a wrong digest) is read again once, then the way from the anchor is tried, then it is an IntegrityError: never a
mix of versions, never an unverified tensor (DESIGN decision 8). Knows nothing of engines.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch

from etude.records.errors import IntegrityError
from etude.weightsync.bits import UNSIGNED, Bits, from_bits, item_size
from etude.weightsync.chain import Manifest, PartEntry, check_link, decode_manifest, manifest_key, version_of
from etude.weightsync.codec import CODEC_ID, apply_part
from etude.weightsync.digests import bits_digest
from etude.weightsync.store import ObjectMissing, ObjectStore, StoreError


@dataclass(frozen=True)
class _Held:
    manifest: Manifest
    bits: dict[str, Bits]


class Subscriber:
    """Follows one run's chain. One thread at a time. The held copy is private: what is given out is the caller's."""

    def __init__(self, store: ObjectStore, run_prefix: str) -> None:
        self._store, self._prefix = store, run_prefix
        self._held: _Held | None = None
        self._newest: str | None = None

    def latest(self) -> str | None:
        """Key of the newest committed manifest, or None. Raises StoreError."""
        newer = self._store.list(f"{self._prefix}/manifest", after=self._newest)
        self._newest = newer[-1] if newer else self._newest
        return self._newest

    def fetch(self, manifest_key: str) -> tuple[Manifest, dict[str, torch.Tensor]]:
        """Exactly that version, verified: its manifest and its tensors (CPU, contiguous; aliases share memory).

        Raises IntegrityError when the store holds no verifiable way to it and StoreError when the store does not answer;
        what is held stays as it was. The way out of damage is a later anchor (`Publisher.anchor_next`).
        """
        target = self._manifest(manifest_key)
        damage: list[str] = []
        for start in (self._held, None) if self._held else (None,):
            try:
                bits = self._rebuild(target, start)
            except IntegrityError as error:
                damage.append(str(error))
                continue
            self._held = _Held(target, bits)
            return target, _tensors(target, bits)
        raise IntegrityError(f"weights of {manifest_key} cannot be verified: {'; then '.join(dict.fromkeys(damage))}")

    def _rebuild(self, target: Manifest, start: _Held | None) -> dict[str, Bits]:
        links: list[Manifest] = []
        at, held = target, None
        while True:
            if start is not None and at.digest == start.manifest.digest:
                held = start
                break
            links.append(at)
            if at.parent is None:
                break
            parent = self._manifest(manifest_key(self._prefix, at.parent))
            check_link(at, parent)
            at = parent
        bits = {name: array.copy() for name, array in held.bits.items()} if held else _zeros(links[-1])
        for link in reversed(links):
            if link.codec != CODEC_ID:
                raise IntegrityError(
                    f"version {link.policy_version} is written in codec {link.codec}; known: {CODEC_ID}"
                )
            for part in link.parts:
                apply_part(self._part(part), bits)
        _verify(target, bits)
        return bits

    def _manifest(self, key: str) -> Manifest:
        version_of(key)
        try:
            return decode_manifest(self._get(key), key)
        except IntegrityError:
            return decode_manifest(self._get(key), key)

    def _part(self, part: PartEntry) -> bytes:
        for _ in range(2):
            data = self._get(part.key)
            if len(data) == part.size and hashlib.sha256(data).hexdigest() == part.sha256:
                return data
        raise IntegrityError(f"{part.key}: {len(data)} bytes that are not the {part.size} bytes of its sha256")

    def _get(self, key: str) -> bytes:
        try:
            return self._store.get(key)
        except (ObjectMissing, StoreError):
            try:
                return self._store.get(key)
            except ObjectMissing as error:
                raise IntegrityError(f"{key} is missing") from error


def _zeros(anchor: Manifest) -> dict[str, Bits]:
    return {
        entry.name: np.zeros(math.prod(entry.shape), dtype=UNSIGNED[item_size(entry.dtype)])
        for entry in anchor.tensors
        if entry.alias_of is None
    }


def _verify(manifest: Manifest, bits: dict[str, Bits]) -> None:
    for entry in manifest.tensors:
        source = bits.get(entry.alias_of or entry.name)
        if source is None or source.size != math.prod(entry.shape) or source.itemsize != item_size(entry.dtype):
            raise IntegrityError(f"version {manifest.policy_version}: {entry.name} is not what the chain holds")
        if bits_digest(entry.name, entry.dtype, entry.shape, source) != entry.digest:
            raise IntegrityError(
                f"version {manifest.policy_version}: {entry.name} does not have its digest after apply"
            )
    if {e.name for e in manifest.tensors if e.alias_of is None} != bits.keys():
        raise IntegrityError(f"version {manifest.policy_version}: the chain holds tensors that the manifest lacks")


def _tensors(manifest: Manifest, bits: dict[str, Bits]) -> dict[str, torch.Tensor]:
    owned = {name: array.copy() for name, array in bits.items()}
    return {e.name: from_bits(owned[e.alias_of or e.name], e.dtype, e.shape) for e in manifest.tensors}
