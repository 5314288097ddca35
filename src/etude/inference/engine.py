"""The engine: one owned thread that runs the scheduler, and the asynchronous face of it (DESIGN decisions 9 and 12).

Callers on any event loop hand their wishes to the thread, which takes them between two steps. New weights are fetched,
verified and loaded beside it while it serves; only the swap itself happens between steps. Knows nothing of sockets.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Protocol, Self

import torch

from etude.inference.config import EngineConfig
from etude.inference.jobs import GrammarFactory, new_job
from etude.inference.protocol import (
    ApplyReply,
    ApplyRequest,
    EngineFault,
    EngineRefused,
    FaultKind,
    GenerateEnd,
    GenerateRequest,
    Health,
    StreamMessage,
)
from etude.inference.sampler import CategoricalSampler, Sampler
from etude.inference.scheduler import Scheduler
from etude.inference.weights import LiveWeights
from etude.model.decoder import Decoder
from etude.records.errors import EngineError, EtudeError, IntegrityError

_SWEEP_S = 0.25
"""How often idle sessions, waits and lost clients are looked at."""


class VersionInfo(Protocol):
    """What the engine reads of a manifest (`weightsync.chain.Manifest`)."""

    @property
    def policy_version(self) -> int: ...
    @property
    def root_digest(self) -> str: ...


class WeightSource(Protocol):
    """Where verified weights come from (`weightsync.subscriber.Subscriber`). `fetch` blocks; it runs off the loop."""

    def fetch(self, manifest_key: str) -> tuple[VersionInfo, Mapping[str, torch.Tensor]]:
        """The manifest and its tensors by name. Raises IntegrityError when they cannot be verified."""
        ...


class _Mailbox:
    """Carries messages from the engine's thread to one event loop; all of a step arrive in one call."""

    def __init__(self) -> None:
        self._outgoing: dict[
            asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[list[StreamMessage]], list[StreamMessage]]]
        ] = {}

    def add(self, reader: _Reader, messages: list[StreamMessage]) -> None:
        self._outgoing.setdefault(reader.loop, []).append((reader.queue, messages))

    def deliver(self) -> None:
        if not self._outgoing:
            return
        outgoing, self._outgoing = self._outgoing, {}
        for loop, letters in outgoing.items():
            try:
                loop.call_soon_threadsafe(_put_all, letters)
            except RuntimeError:  # that loop is closed: its readers are gone
                continue


def _put_all(letters: list[tuple[asyncio.Queue[list[StreamMessage]], list[StreamMessage]]]) -> None:
    for letter_queue, messages in letters:
        letter_queue.put_nowait(messages)


class _Reader:
    """One caller of `generate`: a sink on the engine's thread, a queue on the caller's loop."""

    def __init__(self, mailbox: _Mailbox, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.queue: asyncio.Queue[list[StreamMessage]] = asyncio.Queue()
        self._mailbox = mailbox

    def send(self, messages: list[StreamMessage]) -> None:
        self._mailbox.add(self, messages)


class Engine:
    """Serves one policy. Start it with `start` (or `with`), end it with `close`, which joins its threads.

    `grammars` makes the token masks of a request's grammar; `source` is where `apply` fetches versions; `sampler` is a
    strategy (tests force tokens by `ScriptedSampler`). The decoder belongs to the engine from now on.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig | None = None,
        *,
        grammars: GrammarFactory | None = None,
        source: WeightSource | None = None,
        sampler: Sampler | None = None,
        policy_version: int = 0,
        engine_id: str = "",
    ) -> None:
        self.config = config or EngineConfig()
        self.engine_id = engine_id or f"engine-{uuid.uuid4().hex[:8]}"
        self.weights = LiveWeights(decoder, policy_version)
        self._scheduler = Scheduler(self.weights, self.config, sampler or CategoricalSampler(), self.engine_id)
        self._grammars, self._source = grammars, source
        self._mailbox = _Mailbox()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._closed = True
        self._stop = False
        self._drained: list[Future[None]] = []
        self._thread: threading.Thread | None = None
        self._appliers: ThreadPoolExecutor | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Starts the engine's threads."""
        self._closed = self._stop = False
        self._appliers = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{self.engine_id}-apply")
        self._thread = threading.Thread(target=self._run, name=self.engine_id, daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends everything that runs with `failed` and joins the threads."""
        with self._gate:
            if not self._closed:
                self._inbox.put(self._halt)
                self._closed = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._appliers is not None:
            self._appliers.shutdown(wait=True, cancel_futures=True)
            self._appliers = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- asynchronous face -----------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[StreamMessage, None]:
        """Runs of tokens, then `GenerateEnd` or `EngineFault`. Leaving the iterator early stops the work."""
        async with aclosing(self.batches(request)) as batches:
            async for messages in batches:
                for message in messages:
                    yield message

    async def batches(self, request: GenerateRequest) -> AsyncGenerator[list[StreamMessage], None]:
        """As `generate`, with the messages that became ready together in one list."""
        try:
            job = new_job(
                request,
                vocab_size=self._scheduler.vocab_size,
                max_tokens=self.config.max_session_tokens,
                grammars=self._grammars,
            )
        except EngineRefused as refused:
            yield [EngineFault(refused.kind, refused.message)]
            return
        reader = _Reader(self._mailbox, asyncio.get_running_loop())
        self._post(lambda: self._scheduler.admit(job, reader, time.monotonic()))
        ended = False
        try:
            while not ended:
                # Bounded: every job ends by its tokens, its deadline in the queue, a fault, or the engine's own end.
                messages = await reader.queue.get()
                ended = any(isinstance(message, GenerateEnd | EngineFault) for message in messages)
                yield messages
        finally:
            if not ended:
                self._post(lambda: self._scheduler.detach(request.request_id, reader, time.monotonic()), strict=False)

    async def apply(self, request: ApplyRequest) -> ApplyReply:
        """Fetches, verifies and swaps in a version while serving; applies run one at a time, in order of arrival.

        A manifest that is served already is answered at once. Raises IntegrityError when the weights cannot be proven,
        EngineError on other failures; unless the engine is fenced, the version served before stays whole.
        """
        if self._appliers is None:
            raise EngineError(f"{self.engine_id} is closed")
        abandoned = threading.Event()
        work = self._appliers.submit(self._apply, request, abandoned)
        try:
            # Shielded: a caller that goes away does not stop a version half-way; the next caller finds it applied.
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(work)), self.config.apply_timeout_s)
        except TimeoutError:
            abandoned.set()
            raise EngineError(f"apply {request.manifest_key}: not ready in {self.config.apply_timeout_s:g} s") from None

    async def health(self, *, verify: bool = False) -> Health:
        """State of the engine. `verify` hashes the live tensors between two steps; a change fences and raises IntegrityError."""
        if verify:
            await self._ask(self._scheduler.verify)
        state = self._scheduler
        waiting, free = len(state.waiting), state.table.free_slots
        return Health(
            engine_id=self.engine_id,
            policy_version=self.weights.policy_version,
            digest=self.weights.digest,
            manifest_key=self.weights.manifest_key,
            sessions=len(state.table),
            slots=state.table.slots,
            free_slots=free,
            running=len(state.running),
            waiting=waiting,
            tokens_sampled=state.tokens_sampled,
            tokens_prefilled=state.tokens_prefilled,
            tokens_shared=state.tokens_shared,
            steps=state.steps,
            max_session_tokens=self.config.max_session_tokens,
            busy=waiting > 0 or len(state.running) == state.table.slots,
            draining=state.draining,
            fenced=state.fenced,
        )

    async def drain(self) -> None:
        """Refuses new requests from now on; returns when the running ones have ended. Raises EngineError when it takes too long."""
        drained: Future[None] = Future()
        await self._ask(partial(self._begin_drain, drained))
        try:
            await asyncio.wait_for(asyncio.wrap_future(drained), self.config.drain_timeout_s)
        except TimeoutError:
            raise EngineError(f"{self.engine_id}: requests still run after {self.config.drain_timeout_s:g} s") from None

    async def close_session(self, session_id: str) -> None:
        """Forgets a session and frees its slot; what it runs ends as `cancelled`. An unknown session is no error."""
        await self._ask(lambda: self._scheduler.close_session(session_id))

    # -- hand-over to the thread -----------------------------------------------------------------------------------

    def _post(self, wish: Callable[[], None], *, strict: bool = True) -> None:
        with self._gate:
            if not self._closed:
                self._inbox.put(wish)
            elif strict:
                raise EngineError(f"{self.engine_id} is closed")

    def _call(self, wish: Callable[[], None]) -> Future[None]:
        """Runs a wish on the thread between two steps; the future has its outcome."""
        outcome: Future[None] = Future()

        def granted() -> None:
            try:
                wish()
            except EtudeError as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(None)

        self._post(granted)
        return outcome

    async def _ask(self, wish: Callable[[], None]) -> None:
        await asyncio.wrap_future(self._call(wish))

    def _begin_drain(self, drained: Future[None]) -> None:
        self._scheduler.drain()
        self._drained.append(drained)

    def _halt(self) -> None:
        self._stop = True

    # -- new weights, on the applier's thread ----------------------------------------------------------------------

    def _apply(self, request: ApplyRequest, abandoned: threading.Event) -> ApplyReply:
        started = time.monotonic()
        if self._source is None:
            raise EngineError(f"{self.engine_id} was started without a store to fetch weights from")
        if request.manifest_key == self.weights.manifest_key:
            return ApplyReply(policy_version=self.weights.policy_version, digest=self.weights.digest, seconds=0.0)
        try:
            manifest, tensors = self._source.fetch(request.manifest_key)
            staged = self.weights.stage(tensors)
        except (IntegrityError, EngineError):
            raise
        except Exception as error:
            raise EngineError(f"apply {request.manifest_key}: {error}") from error
        pause = 0.0

        def swap() -> None:
            nonlocal pause
            if abandoned.is_set():
                raise EngineError(f"apply {request.manifest_key} was given up before its swap")
            if self._scheduler.fenced:
                raise IntegrityError(f"{self.engine_id} is fenced: {self._scheduler.fenced}")
            began = time.monotonic()
            key, version, digest = request.manifest_key, manifest.policy_version, manifest.root_digest
            self._scheduler.swap(staged, version, key, digest, request.mode)
            pause = time.monotonic() - began

        try:
            self._call(swap).result(timeout=self.config.apply_timeout_s)
        except FutureTimeout:
            raise EngineError(f"apply {request.manifest_key}: no pause between steps") from None
        return ApplyReply(
            policy_version=self.weights.policy_version,
            digest=self.weights.digest,
            seconds=time.monotonic() - started,
            pause_seconds=pause,
        )

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self.config.threads)
        reason = f"{self.engine_id} is closed"
        try:
            with torch.inference_mode():
                self._serve()
        except Exception as error:
            reason = f"{self.engine_id} failed: {error!r}"
        with self._gate:
            self._closed = True
        self._scheduler.fence(FaultKind.FAILED, reason)
        self._grant_wishes(block_s=0.0)
        self._settle_drains()
        self._mailbox.deliver()

    def _serve(self) -> None:
        swept = time.monotonic()
        active = False
        while not self._stop:
            self._grant_wishes(block_s=0.0 if active else _SWEEP_S)
            now = time.monotonic()
            if now - swept >= _SWEEP_S:
                self._scheduler.sweep(now)
                swept = now
            active = self._scheduler.step(now)
            self._settle_drains()
            self._mailbox.deliver()
            if active:
                self._gather(now + self.config.gather_s)

    def _gather(self, until: float) -> None:
        """Waits for requests of sessions that are between turns: a step costs little more for more rows."""
        state = self._scheduler
        while not self._stop and len(state.table) > len(state.running) > 0:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return
            self._grant_wishes(block_s=left_s)

    def _grant_wishes(self, block_s: float) -> None:
        try:
            wish = self._inbox.get(timeout=block_s) if block_s else self._inbox.get_nowait()
            while True:
                wish()
                wish = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _settle_drains(self) -> None:
        if self._drained and not self._scheduler.running:
            for drained in self._drained:
                if not drained.done():
                    drained.set_result(None)
            self._drained.clear()
