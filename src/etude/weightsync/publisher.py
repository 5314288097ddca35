"""The sender: turns each version of the weights into an anchor or a delta and commits it, behind the trainer's back.

`publish` copies the tensors and returns; one thread, joined by `close`, encodes and uploads. The base of the next delta
moves only when a manifest is committed, so a failed upload loses nothing: the next version covers it. When versions
arrive faster than they upload, the waiting ones coalesce into the newest. Knows nothing of who receives (DESIGN 8).
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, TypeVar

import numpy as np
import torch

from etude.records.errors import BadInput, EtudeError, InfrastructureError, IntegrityError
from etude.weightsync.bits import Bits, dtype_name, to_bits
from etude.weightsync.chain import (
    Manifest,
    PartEntry,
    TensorEntry,
    encode_manifest,
    manifest_key,
    part_key,
    root_of,
    seal,
    version_of,
)
from etude.weightsync.codec import CODEC_ID, Encoded, Encoder, ranges
from etude.weightsync.digests import bits_digest
from etude.weightsync.store import AlreadyExists, ObjectStore, StoreError

T = TypeVar("T")

_BACKOFF_S = 0.05


class PublishTicket:
    """A promise that a version, or a later one that covers it, gets committed."""

    def __init__(self, policy_version: int, step: int) -> None:
        self.policy_version, self.step = policy_version, step
        self.future: Future[Manifest] = Future()
        """Resolves to the manifest that was committed (asyncio: `asyncio.wrap_future`) or to the error."""

    @property
    def done(self) -> bool:
        """Whether it is committed or failed."""
        return self.future.done()


@dataclass(frozen=True)
class PublisherHealth:
    """What a publisher says of itself. `error` is the newest failure, cleared by the next commit; bytes are totals.

    `full_bytes` is what the committed versions would have taken uncompressed; `publish_s` is the newest commit's time.
    """

    committed: int | None = None
    pending: int = 0
    commits: int = 0
    coalesced: int = 0
    failures: int = 0
    fenced: bool = False
    error: str = ""
    sent_bytes: int = 0
    full_bytes: int = 0
    publish_s: float = 0.0


@dataclass
class _Snapshot:
    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]
    policy_version: int
    step: int
    incarnation: int
    tickets: list[PublishTicket] = field(default_factory=list)


@dataclass(frozen=True)
class _Base:
    manifest: Manifest
    bits: dict[str, Bits]


class Publisher:
    """Publishes one run's versions under `run_prefix`. Methods may be called from any thread.

    The first version of a publisher is an anchor, then every `anchor_every`-th. `on_commit` is called in the publisher's
    thread after each commit. Raises StoreError when the store cannot be listed.
    """

    def __init__(
        self,
        store: ObjectStore,
        run_prefix: str,
        anchor_every: int = 25,
        *,
        part_bytes: int = 64 << 20,
        put_attempts: int = 3,
        on_commit: Callable[[Manifest], None] | None = None,
    ) -> None:
        self._store, self._prefix = store, run_prefix
        self._anchor_every, self._part_bytes, self._put_attempts = anchor_every, part_bytes, put_attempts
        self._on_commit = on_commit
        self._writer = uuid.uuid4().hex
        self._encoder = Encoder()
        self._base: _Base | None = None
        self._since_anchor = 0
        self._layout: dict[str, tuple[tuple[int, ...], torch.dtype]] | None = None
        known = store.list(f"{run_prefix}/manifest")
        self._newest = version_of(known[-1]) if known else -1
        self._lock = threading.Condition()
        self._waiting: _Snapshot | None = None
        self._running: _Snapshot | None = None
        self._closing = threading.Event()
        self._anchor_next = False
        self._health = PublisherHealth()
        self._thread = threading.Thread(target=self._work, name=f"publish {run_prefix}", daemon=True)
        self._thread.start()

    def publish(
        self, policy_version: int, step: int, incarnation: int, tensors: Mapping[str, torch.Tensor]
    ) -> PublishTicket:
        """Copies the tensors (any dtypes, kept as given; names that share one memory become aliases) and returns at once.

        Raises BadInput when the version does not grow or the layout differs from the versions before, IntegrityError when
        another writer has taken the chain over, InfrastructureError after `close`.
        """
        with self._lock:
            if self._health.fenced:
                raise IntegrityError(f"weight chain {self._prefix}: {self._health.error}")
            if self._closing.is_set():
                raise InfrastructureError(f"weight chain {self._prefix}: the publisher is closed")
            if policy_version <= self._newest:
                raise BadInput(self._prefix, "policy_version", policy_version, f"a version above {self._newest}")
            layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
            if self._layout is not None and layout != self._layout:
                self._refuse_layout(layout)
            snapshot = _copy(policy_version, step, incarnation, tensors)
            self._layout, self._newest = layout, policy_version
            ticket = PublishTicket(policy_version, step)
            if self._waiting is not None:
                snapshot.tickets = self._waiting.tickets
                self._note(coalesced=self._health.coalesced + 1)
            snapshot.tickets.append(ticket)
            self._waiting = snapshot
            self._lock.notify_all()
            return ticket

    def wait(self, ticket: PublishTicket, timeout_s: float = 60.0) -> Manifest:
        """The committed manifest: the ticket's own or that of a later version it coalesced into. Raises its error.

        Raises InfrastructureError when it is not done within `timeout_s`.
        """
        try:
            return ticket.future.result(timeout_s)
        except TimeoutError:
            raise InfrastructureError(
                f"weight chain {self._prefix}: version {ticket.policy_version} not committed within {timeout_s} s"
            ) from None

    def anchor_next(self) -> None:
        """Makes the next committed version an anchor: the way out for a receiver that cannot verify a delta."""
        with self._lock:
            self._anchor_next = True

    @property
    def health(self) -> PublisherHealth:
        """Counters and the newest error."""
        with self._lock:
            pending = (self._waiting is not None) + (self._running is not None)
            return _replaced(self._health, pending=pending)

    def close(self, timeout_s: float = 60.0) -> None:
        """Finishes what was published, then joins the thread. Raises InfrastructureError when that takes too long."""
        with self._lock:
            self._closing.set()
            self._lock.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise InfrastructureError(f"weight chain {self._prefix}: the publisher did not end within {timeout_s} s")

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    # -- the publisher's thread ------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._lock:
                while self._waiting is None and not self._closing.is_set():
                    self._lock.wait()
                if self._waiting is None:
                    return
                snapshot, self._waiting = self._waiting, None
                self._running = snapshot
            self._serve(snapshot)

    def _serve(self, snapshot: _Snapshot) -> None:
        started = time.perf_counter()
        manifest: Manifest | None = None
        error: BaseException | None = None
        try:
            manifest = self._commit(snapshot)
        except Exception as failure:  # handed to the tickets and shown in `health`
            error = failure
        with self._lock:
            self._running = None
            if manifest is None:
                fenced = self._health.fenced or isinstance(error, IntegrityError)
                self._note(failures=self._health.failures + 1, error=str(error), fenced=fenced)
            else:
                self._note(
                    committed=manifest.policy_version,
                    commits=self._health.commits + 1,
                    error="",
                    sent_bytes=self._health.sent_bytes + manifest.bytes_moved,
                    full_bytes=self._health.full_bytes + sum(t.nbytes for t in snapshot.tensors.values()),
                    publish_s=time.perf_counter() - started,
                )
        if manifest is not None and self._on_commit is not None:
            try:
                self._on_commit(manifest)
            except Exception as failure:  # the commit stands; its listener's fault is shown
                with self._lock:
                    self._note(error=f"on_commit of version {manifest.policy_version}: {failure!r}")
        for ticket in snapshot.tickets:
            if manifest is not None:
                ticket.future.set_result(manifest)
            else:
                wrapped = error if isinstance(error, EtudeError) else InfrastructureError(f"publish: {error!r}")
                ticket.future.set_exception(wrapped)

    def _commit(self, snapshot: _Snapshot) -> Manifest:
        if self._health.fenced:
            raise IntegrityError(f"weight chain {self._prefix}: {self._health.error}")
        with self._lock:
            anchor = self._base is None or self._anchor_next or self._since_anchor + 1 >= self._anchor_every
        base = None if anchor else self._base
        kind: Literal["anchor", "delta"] = "delta" if base else "anchor"
        bits = {name: to_bits(tensor) for name, tensor in sorted(snapshot.tensors.items())}
        parts = tuple(self._upload(data, kind, snapshot.policy_version) for data in self._encode(bits, base))
        entries = _entries(snapshot, bits)
        manifest = seal(
            Manifest(
                policy_version=snapshot.policy_version,
                step=snapshot.step,
                incarnation=snapshot.incarnation,
                kind=kind,
                parent=base.manifest.policy_version if base else None,
                parent_digest=base.manifest.root_digest if base else "",
                codec=CODEC_ID,
                tensors=entries,
                parts=parts,
                root_digest=root_of({entry.name: entry.digest for entry in entries}),
                writer=self._writer,
            )
        )
        self._create(manifest_key(self._prefix, snapshot.policy_version), encode_manifest(manifest))
        with self._lock:
            self._base = _Base(manifest, bits)
            self._since_anchor = 0 if anchor else self._since_anchor + 1
            self._anchor_next = self._anchor_next and not anchor
        return manifest

    def _encode(self, bits: dict[str, Bits], base: _Base | None) -> list[bytes]:
        parts: list[bytes] = []
        blocks: list[Encoded] = []
        size = 0
        for name, new in bits.items():
            for start, stop in ranges(len(new)):
                old = base.bits[name][start:stop] if base else np.zeros_like(new[start:stop])
                if (encoded := self._encoder.encode(name, old, new[start:stop], start)) is None:
                    continue
                blocks.append(encoded)
                size += sum(encoded[0].sizes)
                if size >= self._part_bytes:
                    parts.append(self._encoder.part(blocks))
                    blocks, size = [], 0
        if blocks:
            parts.append(self._encoder.part(blocks))
        return parts

    def _upload(self, data: bytes, kind: str, policy_version: int) -> PartEntry:
        sha256 = hashlib.sha256(data).hexdigest()
        key = part_key(self._prefix, kind, policy_version, sha256)
        # A plain put: what an earlier crash left torn under this key is healed by writing it again.
        self._tried(lambda: self._store.put(key, data))
        return PartEntry(key=key, size=len(data), sha256=sha256)

    def _create(self, key: str, data: bytes) -> None:
        try:
            self._tried(lambda: self._store.put_if_absent(key, data))
        except AlreadyExists:
            # A put whose answer was lost may have arrived: the object is then ours, byte for byte.
            if self._tried(lambda: self._store.get(key)) != data:
                raise IntegrityError(f"weight chain: {key} was committed by another writer") from None

    def _tried(self, action: Callable[[], T]) -> T:
        for attempt in range(1, self._put_attempts):
            try:
                return action()
            except StoreError:
                self._closing.wait(_BACKOFF_S * 2**attempt)
        return action()

    # -- held lock -------------------------------------------------------------------------------------------------

    def _note(self, **changes: object) -> None:
        self._health = _replaced(self._health, **changes)

    def _refuse_layout(self, layout: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        assert self._layout is not None
        for name in sorted(layout.keys() | self._layout.keys()):
            if layout.get(name) != self._layout.get(name):
                raise BadInput(self._prefix, f"tensor {name}", layout.get(name), f"{self._layout.get(name)} as before")


def _replaced(health: PublisherHealth, **changes: object) -> PublisherHealth:
    return PublisherHealth(**{**health.__dict__, **changes})


def _copy(policy_version: int, step: int, incarnation: int, tensors: Mapping[str, torch.Tensor]) -> _Snapshot:
    owners: dict[tuple[object, ...], str] = {}
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and (owner := owners.setdefault(place, name)) != name:
            aliases[name] = owner
        else:
            kept[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return _Snapshot(kept, aliases, policy_version, step, incarnation)


def _entries(snapshot: _Snapshot, bits: dict[str, Bits]) -> tuple[TensorEntry, ...]:
    entries: list[TensorEntry] = []
    for name in sorted([*snapshot.tensors, *snapshot.aliases]):
        owner = snapshot.aliases.get(name)
        tensor = snapshot.tensors[owner or name]
        dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
        digest = bits_digest(name, dtype, shape, bits[owner or name])
        entries.append(TensorEntry(name=name, shape=shape, dtype=dtype, digest=digest, alias_of=owner))
    return tuple(entries)
