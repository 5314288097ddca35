"""One rollout's dialogue with the engine: new tokens only, repeated request ids, a new session when prefixes differ.

Gives back exactly the ids that the engine sampled, with log-probabilities and versions as the engine stamped them
(DESIGN decisions 1, 9, 12). Knows nothing of tools, tasks or text.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import zstandard

from etude.chat.grammar import GrammarSpec
from etude.inference.client import EngineClient, SessionRoutes
from etude.inference.protocol import (
    EngineRefused,
    FaultKind,
    GenerateEnd,
    GenerateRequest,
    GenerationEvent,
    TokenEvent,
    prefix_digest,
)
from etude.records.errors import EngineError, IntegrityError, PrefixMismatch
from etude.records.rollout import BlobRef

BlobSink = Callable[[bytes], str]
"""Keeps bytes and returns their sha256 hex digest."""

_FINAL_REFUSALS = frozenset({FaultKind.TOO_LONG, FaultKind.BAD_REQUEST, FaultKind.DRAINING})
_NOTHING_RAN = frozenset({FaultKind.BUSY})


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """One generation as the engine gave it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    finish: str
    engine_id: str
    routes: BlobRef | None
    masks: BlobRef | None
    retries: int


class EngineSession:
    """Owns the engine session of one rollout; close it when the rollout ends.

    Session names are drawn anew for every rollout object, so an engine's memory of repeated requests never answers
    for another rollout of the same task and seed.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        name: str,
        vocab_size: int,
        blob_sink: BlobSink,
        idle_s: float,
        attempts: int,
    ) -> None:
        self._engine, self._name, self._vocab_size = engine, f"{name}-{secrets.token_hex(6)}", vocab_size
        self._blob_sink, self._idle_s, self._attempts = blob_sink, idle_s, attempts
        self._opened = 0
        self._requests = 0
        self._open()

    def _open(self) -> None:
        self._session_id = f"{self._name}.{self._opened}"
        self._opened += 1
        self._held: tuple[int, ...] = ()
        self._routes = SessionRoutes()

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        stop_ids: tuple[int, ...],
        grammar: GrammarSpec | None,
    ) -> Sampled:
        """Samples one action after `prompt_ids`, sending only what the session lacks.

        Retries at the smallest scope that is safe: a lost answer is asked for again under its request id, a foreign
        prefix or a broken session goes on in a new session with all ids. Raises EngineError when `attempts` are spent
        or the engine refuses for good, IntegrityError when what arrived is not what the engine vouches for.
        """
        prompt = tuple(prompt_ids)
        if prompt[: len(self._held)] != self._held:
            await self._replace()
        request_id = self._next_request_id()
        failures = 0
        while True:
            request = GenerateRequest(
                request_id=request_id,
                session_id=self._session_id,
                prefix_digest=prefix_digest(self._held),
                new_token_ids=prompt[len(self._held) :],
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                stop_ids=stop_ids,
                grammar=grammar,
            )
            try:
                events, end = await self._gather(request)
                return self._take(prompt, events, end, failures)
            except PrefixMismatch:
                failures += 1
                if failures >= self._attempts:
                    raise
                await self._replace()
                request_id = self._next_request_id()
            except EngineRefused as error:
                failures += 1
                if error.kind in _FINAL_REFUSALS or failures >= self._attempts:
                    raise
                if error.kind not in _NOTHING_RAN:
                    await self._replace()
                request_id = self._next_request_id()
                await asyncio.sleep(min(1.0, 0.05 * 2**failures))
            except EngineError:
                failures += 1
                if failures >= self._attempts:
                    raise
                await asyncio.sleep(min(1.0, 0.05 * 2**failures))

    def _next_request_id(self) -> str:
        self._requests += 1
        return f"{self._name}/{self._requests}"

    async def _gather(self, request: GenerateRequest) -> tuple[list[TokenEvent], GenerateEnd]:
        events: list[TokenEvent] = []
        stream = self._engine.generate(request)
        try:
            while True:
                # Not `wait_for`, which loses a cancellation that comes as the awaited call ends.
                async with asyncio.timeout(self._idle_s):
                    event = await _next(stream)
                if isinstance(event, GenerateEnd):
                    return events, event
                events.append(event)
        except TimeoutError:
            raise EngineError(f"generate {request.request_id}: nothing for {self._idle_s} s") from None
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()

    def _take(self, prompt: tuple[int, ...], events: list[TokenEvent], end: GenerateEnd, failures: int) -> Sampled:
        sampled = tuple(event.token_id for event in events)
        if end.sampled != len(sampled):
            raise EngineError(f"{len(sampled)} of {end.sampled} sampled tokens arrived")
        if end.session_length != len(prompt) + len(sampled):
            raise IntegrityError(
                f"the engine's session holds {end.session_length} ids, not {len(prompt)}+{len(sampled)}"
            )
        routes = None
        if math.prod(end.routes_shape_tail) > 0:
            rows = self._routes.add(end)
            routes = self._keep(rows.tobytes(), end.routes_dtype, tuple(int(size) for size in rows.shape))
        masks = None
        if end.masks:
            shape = (len(sampled), math.ceil(self._vocab_size / 8))
            masks = self._keep(
                zstandard.decompress(end.masks, max_output_size=max(1, math.prod(shape))), "uint8", shape
            )
        self._held = prompt + sampled
        return Sampled(
            token_ids=sampled,
            logprobs=tuple(event.logprob for event in events),
            policy_versions=tuple(event.policy_version for event in events),
            finish=str(end.finish),
            engine_id=end.engine_id,
            routes=routes,
            masks=masks,
            retries=failures,
        )

    def _keep(self, data: bytes, dtype: str, shape: tuple[int, ...]) -> BlobRef:
        return BlobRef(digest=self._blob_sink(data), dtype=dtype, shape=shape)

    async def _replace(self) -> None:
        await self.close()
        self._open()

    async def close(self) -> None:
        """Frees the engine's slot; an engine that cannot be reached frees it by itself."""
        try:
            async with asyncio.timeout(min(self._idle_s, 10.0)):
                await self._engine.close_session(self._session_id)
        except (EngineError, TimeoutError):
            pass


async def _next(stream: AsyncIterator[GenerationEvent]) -> GenerationEvent:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        raise EngineError("the stream ended without its end message") from None
