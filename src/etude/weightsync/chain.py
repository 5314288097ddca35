"""The version chain: manifests, their keys and the checks on a link. Pure: no tensors and no store.

A manifest is written last and created once: it is the commit point of its version (DESIGN decision 8). An anchor holds
the whole state and has no parent; a delta names its parent's version and the digest of the parent's state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal

import msgspec

from etude.records.errors import IntegrityError

MANIFEST_VERSION = 1


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor after this version is applied: `digest` is its `tensor_digest`; an alias shares another's bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str
    alias_of: str | None = None


class PartEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One object of encoded blocks: its key, size in bytes, sha256 hex of its bytes."""

    key: str
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What one committed version is. `tensors` are sorted by name; `root_digest` is the digest of the whole state.

    `writer` is random per publisher, so that no two writers can commit equal bytes; `digest` covers every other field.
    """

    version: int = MANIFEST_VERSION
    policy_version: int
    step: int
    incarnation: int
    kind: Literal["anchor", "delta"]
    parent: int | None
    parent_digest: str
    codec: str
    tensors: tuple[TensorEntry, ...]
    parts: tuple[PartEntry, ...]
    root_digest: str
    writer: str
    digest: str = ""

    @property
    def bytes_moved(self) -> int:
        """Bytes of all parts."""
        return sum(part.size for part in self.parts)


def root_of(digests: Mapping[str, str]) -> str:
    """sha256 hex over the sorted (name, tensor digest) pairs."""
    found = hashlib.sha256()
    for name in sorted(digests):
        found.update(f"{name}={digests[name]}\n".encode())
    return found.hexdigest()


def manifest_key(prefix: str, policy_version: int) -> str:
    """Key of a version's manifest; keys sort as versions do."""
    return f"{prefix}/manifest/{policy_version:012d}.json"


def part_key(prefix: str, kind: str, policy_version: int, sha256: str) -> str:
    """Key of a part, content-hashed: equal keys hold equal bytes."""
    return f"{prefix}/{kind}/{policy_version:012d}/{sha256}"


def version_of(key: str) -> int:
    """The policy version in a manifest's key. Raises IntegrityError when it is no such key."""
    stem = key.rsplit("/", 1)[-1].removesuffix(".json")
    if not stem.isdigit():
        raise IntegrityError(f"weight chain: {key} is no manifest key")
    return int(stem)


def seal(manifest: Manifest) -> Manifest:
    """The manifest with its own `digest` filled in."""
    return msgspec.structs.replace(manifest, digest=_digest(manifest))


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON bytes of a sealed manifest."""
    return msgspec.json.encode(manifest)


def decode_manifest(data: bytes, key: str) -> Manifest:
    """Reads and checks a manifest. Raises IntegrityError when it is damaged, of another format or under a wrong key."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise IntegrityError(f"weight chain: {key} is damaged ({error})") from error
    if manifest.version != MANIFEST_VERSION:
        raise IntegrityError(f"weight chain: {key} has format {manifest.version}; expected {MANIFEST_VERSION}")
    if manifest.digest != _digest(manifest) or encode_manifest(manifest) != data:
        raise IntegrityError(f"weight chain: {key} is damaged (its bytes do not have the digest that it states)")
    if manifest.policy_version != version_of(key):
        raise IntegrityError(f"weight chain: {key} holds version {manifest.policy_version}")
    if manifest.root_digest != root_of({tensor.name: tensor.digest for tensor in manifest.tensors}):
        raise IntegrityError(f"weight chain: {key} states a root digest that its tensors do not have")
    if (manifest.kind == "anchor") != (manifest.parent is None):
        raise IntegrityError(f"weight chain: {key} is a {manifest.kind} with parent {manifest.parent}")
    if manifest.parent is not None and manifest.parent >= manifest.policy_version:
        raise IntegrityError(f"weight chain: {key} has the later version {manifest.parent} as its parent")
    return manifest


def check_link(child: Manifest, parent: Manifest) -> None:
    """Raises IntegrityError unless `child` is a delta on exactly the state of `parent`, tensor for tensor."""
    if child.parent != parent.policy_version:
        raise IntegrityError(
            f"weight chain: version {child.policy_version} follows {child.parent}, not {parent.policy_version}"
        )
    if child.parent_digest != parent.root_digest:
        raise IntegrityError(
            f"weight chain: version {child.policy_version} was made on state {child.parent_digest[:12]} of version "
            f"{child.parent}, but that version is {parent.root_digest[:12]}"
        )
    before = {t.name: (t.shape, t.dtype, t.alias_of) for t in parent.tensors}
    after = {t.name: (t.shape, t.dtype, t.alias_of) for t in child.tensors}
    if before != after:
        names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        raise IntegrityError(
            f"weight chain: version {child.policy_version} changes the layout of {', '.join(names[:3])} without an anchor"
        )


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(manifest, digest=""))).hexdigest()
