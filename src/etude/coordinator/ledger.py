"""The run's one ledger: a log of objects `ledger/<n>`, each created once, in the run's object store (DESIGN decision 5).

Records are applied to the live state at once, so that an illegal one never reaches the log, and committed in batches. A
coordinator's epoch is the creation of `epoch/<n>` and its first act is a record: an older coordinator's next object meets a
taken key and it stops. Each object states the sha256 of itself and of its predecessor and the counts after it, so a
flipped bit, a gap or a forged object is found by replay. Knows nothing of Ray or of what the records are about.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import msgspec

from etude.coordinator.entries import EpochStarted, Record, Rules
from etude.coordinator.run_state import Counts, RunState, StateImage
from etude.records.errors import EtudeError, InfrastructureError, IntegrityError
from etude.weightsync.store import AlreadyExists, ObjectMissing, ObjectStore, StoreError

LEDGER_VERSION = 1

T = TypeVar("T", "LedgerObject", "Snapshot")
R = TypeVar("R")


class Fenced(IntegrityError):
    """A newer coordinator took the run over; this one commits nothing more."""


class LedgerObject(msgspec.Struct, frozen=True, kw_only=True):
    """One committed batch. `previous` is the sha256 hex of the object before it, `counts` are those after its records."""

    version: int = LEDGER_VERSION
    number: int
    epoch: int
    writer: str
    previous: str
    at: float
    """Unix time; nothing is decided by it."""
    records: tuple[Record, ...]
    counts: Counts


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state after object `number`, whose sha256 hex is `previous`: where a replay may begin."""

    version: int = LEDGER_VERSION
    number: int
    previous: str
    state: StateImage


@dataclass
class Replay:
    """A state and the place in the log that it stands at."""

    state: RunState
    number: int = -1
    previous: str = ""
    replayed: int = 0
    """Objects read after the snapshot."""


def replay(store: ObjectStore, run: str, onto: Replay | None = None) -> Replay:
    """Rebuilds a run's state from its newest sound snapshot and the objects after it; reads only.

    Goes on from `onto` when it is given. Raises IntegrityError when the log is damaged or breaks an invariant.
    """
    at = onto if onto is not None else _newest_snapshot(store, run)
    for key in store.list(f"{run}/ledger", after=_ledger_key(run, at.number)):
        data = store.get(key)
        entry = _unpack(data, LedgerObject, key)
        if key != _ledger_key(run, at.number + 1) or entry.number != at.number + 1:
            raise IntegrityError(f"{key} follows object {at.number}: the log has a gap")
        if entry.previous != at.previous:
            raise IntegrityError(f"{key} follows an object {entry.previous[:12]}, but that one is {at.previous[:12]}")
        for record in entry.records:
            try:
                at.state.apply(record)
            except IntegrityError as error:
                raise IntegrityError(f"{key}: {error}") from error
        if entry.epoch != at.state.epoch:
            raise IntegrityError(f"{key} was written by epoch {entry.epoch} during epoch {at.state.epoch}")
        if entry.counts != at.state.counts:
            raise IntegrityError(f"{key} states {entry.counts}; its records give {at.state.counts}")
        at.number, at.previous, at.replayed = entry.number, _sha(data), at.replayed + 1
    return at


class Ledger:
    """The live log of one coordinator. Made by `open`; used on one event loop; ended by `close`."""

    def __init__(self, store: ObjectStore, run: str, at: Replay, epoch: int, writer: str) -> None:
        self.store, self.run, self.epoch = store, run, epoch
        self.state = at.state
        self.error: EtudeError | None = None
        """Why the ledger stopped, or None."""
        self.snapshot_error = ""
        """The newest snapshot that could not be written; the log itself is whole."""
        self.window_s = 0.01
        self.snapshot_every = 1000
        self.timeout_s = 60.0
        self.attempts = 4
        self._at, self._writer = at, writer
        self._pending: list[Record] = []
        self._counts = Counts()
        self._waiters: list[asyncio.Future[None]] = []
        self._wake, self._flush, self._stopped = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        store: ObjectStore,
        run: str,
        rules: Rules,
        *,
        resumed_step: int | None = None,
        window_s: float = 0.01,
        snapshot_every: int = 1000,
    ) -> Ledger:
        """Takes the run over: replays it, claims the next epoch and commits `EpochStarted` as its first act.

        `resumed_step` is the step of the checkpoint that the trainer starts from, by default the newest committed one.
        Raises IntegrityError when the log is damaged, Fenced when a newer coordinator came first.
        """
        at = await asyncio.to_thread(replay, store, run)
        writer = uuid.uuid4().hex
        epoch = await asyncio.to_thread(_claim, store, run, at.state.epoch, writer)
        ledger = cls(store, run, at, epoch, writer)
        ledger.window_s, ledger.snapshot_every = window_s, snapshot_every
        await ledger._begin(rules, resumed_step)
        ledger._task = asyncio.create_task(ledger._commit_batches(), name=f"ledger {run}")
        return ledger

    def record(self, *records: Record) -> asyncio.Future[None]:
        """Applies records in order, at once; the future resolves when they are committed, all in one object.

        Raises IntegrityError when a record breaks an invariant; the ledger then stops, and says so to every later caller.
        Nothing that the world can see may be done on a record before that. The future may be left alone: a failed commit
        shows in `error` and at the next call.
        """
        if self.error is not None:
            raise self.error
        if self._closing or self._task is None:
            raise InfrastructureError(f"ledger of {self.run}: it is closed")
        try:
            for record in records:
                self.state.apply(record)
        except IntegrityError as error:
            self._stop(error)
            raise
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter.add_done_callback(_seen)
        self._pending.extend(records)
        self._counts = self.state.counts
        self._waiters.append(waiter)
        self._wake.set()
        return waiter

    async def append(self, *records: Record) -> None:
        """`record`, and waits until they are committed."""
        await self.record(*records)

    async def flush(self) -> None:
        """Commits what is pending without waiting for the batch window."""
        if self._waiters:
            self._flush.set()
            await asyncio.shield(self._waiters[-1])
        elif self.error is not None:
            raise self.error

    async def stopped(self) -> EtudeError | None:
        """Waits until the ledger stops: the error that stopped it, or None after `close`."""
        await self._stopped.wait()
        return self.error

    async def close(self) -> None:
        """Commits what is pending and ends. Does not raise what `record` or the waiters have already raised."""
        self._closing = True
        self._flush.set()
        self._wake.set()
        if self._task is not None:
            await self._task
        self._stopped.set()

    async def __aenter__(self) -> Ledger:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.close()

    # -- committing ------------------------------------------------------------------------------------------------

    async def _begin(self, rules: Rules, resumed_step: int | None) -> None:
        while True:
            if self.state.epoch >= self.epoch:
                raise Fenced(f"ledger of {self.run}: epoch {self.epoch} came after epoch {self.state.epoch} had begun")
            start = EpochStarted(
                epoch=self.epoch,
                incarnation=self.state.incarnation + 1,
                resumed_step=self.state.step if resumed_step is None else resumed_step,
                rules=rules,
            )
            ahead = RunState.of(self.state.image())
            ahead.apply(start)
            try:
                await self._create(self._object((start,), ahead.counts))
            except Fenced:  # the older coordinator wrote once more before our first act: take that in and try again
                self._at = await asyncio.to_thread(replay, self.store, self.run, self._at)
                self.state = self._at.state
                continue
            self.state = self._at.state = ahead
            return

    async def _commit_batches(self) -> None:
        while self._waiters or not (self._closing or self.error):
            await self._wake.wait()
            self._wake.clear()
            if self._waiters:
                if not self._closing:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._flush.wait(), self.window_s)
                self._flush.clear()
                await self._commit_pending()
                self._wake.set()

    async def _commit_pending(self) -> None:
        entry = self._object(tuple(self._pending), self._counts)
        image = self.state.image() if (entry.number + 1) % self.snapshot_every == 0 and not self.error else None
        waiters, self._waiters, self._pending = self._waiters, [], []
        try:
            await self._create(entry)
        except Exception as failure:
            error = failure if isinstance(failure, EtudeError) else InfrastructureError(f"ledger: {failure!r}")
            _answer(waiters, error)
            self._stop(error)
            return
        _answer(waiters, None)
        if image is not None:
            await self._save_snapshot(image)

    def _object(self, records: tuple[Record, ...], counts: Counts) -> LedgerObject:
        return LedgerObject(
            number=self._at.number + 1,
            epoch=self.epoch,
            writer=self._writer,
            previous=self._at.previous,
            at=time.time(),
            records=records,
            counts=counts,
        )

    async def _create(self, entry: LedgerObject) -> None:
        key, data = _ledger_key(self.run, entry.number), _pack(entry)
        try:
            await self._tried(lambda: self.store.put_if_absent_async(key, data))
        except AlreadyExists:
            found = await self._tried(lambda: self.store.get_async(key))
            if found != data:  # else it is our own, whose answer was lost
                other = _unpack(found, LedgerObject, key)
                raise Fenced(
                    f"ledger of {self.run}: object {entry.number} was written by epoch {other.epoch}; epoch {self.epoch} "
                    f"stops and commits nothing more"
                ) from None
        self._at.number, self._at.previous = entry.number, _sha(data)

    async def _save_snapshot(self, image: StateImage) -> None:
        snapshot = Snapshot(number=self._at.number, previous=self._at.previous, state=image)
        try:
            await self._tried(
                lambda: asyncio.to_thread(self.store.put, _snapshot_key(self.run, snapshot.number), _pack(snapshot))
            )
        except EtudeError as error:
            self.snapshot_error = str(error)

    async def _tried(self, action: Callable[[], Awaitable[R]]) -> R:
        attempt = 0
        while True:
            attempt += 1
            try:
                async with asyncio.timeout(self.timeout_s):
                    return await action()
            except (StoreError, TimeoutError) as error:
                if attempt >= self.attempts:
                    raise StoreError(f"ledger of {self.run}: {error or 'no answer'} ({attempt} attempts)") from error
            await asyncio.sleep(0.02 * 4**attempt)

    def _stop(self, error: EtudeError) -> None:
        """Keeps the first error. What was legally recorded before it is still committed, unless it cannot be."""
        if self.error is None:
            self.error = error
        if not isinstance(error, IntegrityError) or isinstance(error, Fenced):
            _answer(self._waiters, error)
            self._waiters, self._pending = [], []
        self._stopped.set()
        self._flush.set()
        self._wake.set()


def _answer(waiters: list[asyncio.Future[None]], error: EtudeError | None) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_exception(error) if error else waiter.set_result(None)


def _seen(waiter: asyncio.Future[None]) -> None:
    if not waiter.cancelled():
        waiter.exception()


def _ledger_key(run: str, number: int) -> str:
    return f"{run}/ledger/{number:012d}" if number >= 0 else f"{run}/ledger/"


def _snapshot_key(run: str, number: int) -> str:
    return f"{run}/snapshot/{number:012d}"


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _pack(value: LedgerObject | Snapshot) -> bytes:
    body = msgspec.msgpack.encode(value)
    return hashlib.sha256(body).digest() + body


def _unpack(data: bytes, kind: type[T], key: str) -> T:
    body = data[32:]
    if hashlib.sha256(body).digest() != data[:32]:
        raise IntegrityError(f"{key} is damaged: its {len(data)} bytes do not have the digest that they begin with")
    try:
        value = msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise IntegrityError(f"{key} is no {kind.__name__} ({error})") from error
    if value.version != LEDGER_VERSION:
        raise IntegrityError(f"{key} has format {value.version}; expected {LEDGER_VERSION}")
    return value


def _newest_snapshot(store: ObjectStore, run: str) -> Replay:
    for key in reversed(store.list(f"{run}/snapshot")):
        try:
            snapshot = _unpack(store.get(key), Snapshot, key)
            if _sha(store.get(_ledger_key(run, snapshot.number))) == snapshot.previous:
                return Replay(RunState.of(snapshot.state), snapshot.number, snapshot.previous)
        except (IntegrityError, ObjectMissing):
            continue  # a snapshot only saves time: the log before it says the same
    return Replay(RunState())


def _claim(store: ObjectStore, run: str, epoch: int, writer: str) -> int:
    known = [int(key.rsplit("/", 1)[-1]) for key in store.list(f"{run}/epoch")]
    epoch = max([epoch, *known])
    while True:
        epoch += 1
        try:
            store.put_if_absent(f"{run}/epoch/{epoch:09d}", writer.encode())
        except AlreadyExists:
            continue
        return epoch
