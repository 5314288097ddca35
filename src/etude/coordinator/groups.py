"""Sealed groups as the trainer reads them: one object a group, `groups/<digest>`, beside the ledger that names it.

The digest is that of the encoded record; the record names its arrays by theirs. What is trained is what lies in the store,
so a damaged or exchanged group stops the run before a step is made of it. Knows nothing of rewards or of the ledger.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec
import zstandard

from etude.records.errors import IntegrityError
from etude.records.rollout import Group, encode
from etude.weightsync.store import AlreadyExists, ObjectMissing, ObjectStore

GROUP_VERSION = 1


class StoredGroup(msgspec.Struct, frozen=True, kw_only=True):
    """An encoded `Group` and the arrays (routes, masks) that training it needs, by sha256 hex."""

    version: int = GROUP_VERSION
    record: bytes
    blobs: dict[str, bytes] = {}


class GroupArchive:
    """The groups of one run. Methods may be called from any thread. All raise StoreError when the store fails."""

    def __init__(self, store: ObjectStore, run: str) -> None:
        self._store, self._run = store, run

    def keep(self, group: Group, blobs: Mapping[str, bytes]) -> str:
        """Stores the group once and returns its digest."""
        record = encode(group)
        digest = _sha(record)
        packed = zstandard.compress(msgspec.msgpack.encode(StoredGroup(record=record, blobs=dict(blobs))), 3)
        try:
            self._store.put_if_absent(self.key(digest), hashlib.sha256(packed).digest() + packed)
        except AlreadyExists:
            pass  # the same record under the same name; a damaged one shows when it is loaded
        return digest

    def load(self, digest: str) -> StoredGroup:
        """The group of that digest, every byte verified. Raises IntegrityError when it is missing or damaged."""
        key = self.key(digest)
        try:
            data = self._store.get(key)
        except ObjectMissing as error:
            raise IntegrityError(f"{key} is missing, but the ledger has it sealed") from error
        packed = data[32:]
        if hashlib.sha256(packed).digest() != data[:32]:
            raise IntegrityError(f"{key} is damaged: its {len(data)} bytes do not have the digest that they begin with")
        try:
            found = msgspec.msgpack.decode(zstandard.decompress(packed), type=StoredGroup)
        except (zstandard.ZstdError, msgspec.DecodeError) as error:
            raise IntegrityError(f"{key} is no group ({error})") from error
        if found.version != GROUP_VERSION:
            raise IntegrityError(f"{key} has format {found.version}; expected {GROUP_VERSION}")
        if _sha(found.record) != digest:
            raise IntegrityError(f"{key} holds another group, {_sha(found.record)[:12]}")
        for name, blob in found.blobs.items():
            if _sha(blob) != name:
                raise IntegrityError(f"{key}: array {name[:12]} is not what its name says")
        return found

    def key(self, digest: str) -> str:
        """Where the group of that digest lies."""
        return f"{self._run}/groups/{digest}"


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
