"""Clients of the engine protocol: over HTTP and in process, with the same messages. No torch here.

`complete` gathers one generation, `SessionRoutes` joins the route rows that a session's generations deliver. A lost
connection is taken up again under the same request id, which never samples twice; nothing else is retried here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

import httpx
import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from etude.inference.protocol import (
    ApplyReply,
    ApplyRequest,
    CloseRequest,
    EngineFault,
    FrameReader,
    GenerateEnd,
    GenerateRequest,
    GenerationEvent,
    Health,
    StreamMessage,
    TokenEvent,
    TokenRun,
    fault_error,
    routes_digest,
)
from etude.records.errors import BadInput, EngineError, IntegrityError

Routes = npt.NDArray[np.unsignedinteger[Any]]

_KEPT_S = 30.0
"""How long an idle connection is kept; the server keeps it longer, so that none is lost as it is taken up again."""


class EngineClient(Protocol):
    """What a room that samples sees of an engine."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationEvent]:
        """Streams `TokenEvent`s, then one `GenerateEnd`. Raises PrefixMismatch, EngineRefused, EngineError, IntegrityError."""
        ...

    async def apply(self, request: ApplyRequest) -> ApplyReply:
        """Swaps in a version; returns after the swap. Raises IntegrityError or EngineError; the old version then stays."""
        ...

    async def health(self, *, verify: bool = False) -> Health:
        """State of the engine; `verify` hashes the live tensors anew and raises IntegrityError when they changed."""
        ...

    async def drain(self) -> None:
        """Refuses new requests and returns when the running ones have ended."""
        ...

    async def close_session(self, session_id: str) -> None:
        """Frees the session's slot; an unknown session is no error."""
        ...

    async def aclose(self) -> None:
        """Frees what the client holds; the engine lives on."""
        ...


class InProcessEngine(Protocol):
    """What `LocalEngineClient` needs of an engine (`inference.engine.Engine`)."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[StreamMessage, None]: ...
    async def apply(self, request: ApplyRequest) -> ApplyReply: ...
    async def health(self, *, verify: bool = False) -> Health: ...
    async def drain(self) -> None: ...
    async def close_session(self, session_id: str) -> None: ...


class LocalEngineClient:
    """A client of an engine in this process."""

    def __init__(self, engine: InProcessEngine) -> None:
        self._engine = engine

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent, None]:
        """See `EngineClient.generate`."""
        async with aclosing(self._engine.generate(request)) as messages:
            async for message in messages:
                if isinstance(message, TokenRun):
                    for event in message.events():
                        yield event
                elif isinstance(message, EngineFault):
                    raise fault_error(message)
                else:
                    yield message

    async def apply(self, request: ApplyRequest) -> ApplyReply:
        """See `EngineClient.apply`."""
        return await self._engine.apply(request)

    async def health(self, *, verify: bool = False) -> Health:
        """See `EngineClient.health`."""
        return await self._engine.health(verify=verify)

    async def drain(self) -> None:
        """See `EngineClient.drain`."""
        await self._engine.drain()

    async def close_session(self, session_id: str) -> None:
        """See `EngineClient.close_session`."""
        await self._engine.close_session(session_id)

    async def aclose(self) -> None:
        """Nothing to free: the engine's owner closes it."""


class HttpEngineClient:
    """A client of `etude serve inference` at `url`. Waits are bounded by `timeout_s` between two chunks of a stream."""

    def __init__(
        self, url: str, *, timeout_s: float = 120.0, apply_timeout_s: float = 300.0, reconnects: int = 2
    ) -> None:
        self._url = url.rstrip("/")
        self._apply_timeout_s, self._reconnects = apply_timeout_s, reconnects
        self._http = httpx.AsyncClient(
            base_url=self._url,
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=512, max_keepalive_connections=128, keepalive_expiry=_KEPT_S),
            trust_env=False,
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent, None]:
        """See `EngineClient.generate`."""
        body = msgspec.msgpack.encode(request)
        yielded, lost = 0, 0
        while True:
            seen = 0
            end: GenerateEnd | None = None
            try:
                async with self._http.stream("POST", "/v1/generate", content=body) as response:
                    reader = FrameReader()
                    async for chunk in response.aiter_raw():
                        for message in reader.feed(chunk):
                            if isinstance(message, TokenRun):
                                for event in message.events():
                                    seen += 1
                                    if seen > yielded:
                                        yielded = seen
                                        yield event
                            elif isinstance(message, EngineFault):
                                raise fault_error(message)
                            else:
                                end = message
                    # Read out rather than left at the end message: only then is the connection kept for the next request.
                if end is not None:
                    yield end
                    return
                raise httpx.RemoteProtocolError("the stream ended before GenerateEnd")
            except (httpx.TransportError, BadInput) as error:
                if end is not None:  # whole already: what was lost is the connection only
                    yield end
                    return
                lost += 1
                if lost > self._reconnects:
                    raise EngineError(f"{self._url}: generate {request.request_id}: {error!r}") from error
                await asyncio.sleep(0.05 * lost)

    async def _call(self, method: str, path: str, message: msgspec.Struct | None, timeout_s: float) -> bytes:
        content = b"" if message is None else msgspec.msgpack.encode(message)
        try:
            response = await self._http.request(method, path, content=content, timeout=timeout_s)
        except httpx.TransportError as error:
            raise EngineError(f"{self._url}{path}: {error!r}") from error
        if response.status_code != 200:
            try:
                fault = msgspec.msgpack.decode(response.content, type=EngineFault)
            except msgspec.DecodeError as error:
                raise EngineError(f"{self._url}{path}: HTTP {response.status_code}") from error
            raise fault_error(fault)
        return response.content

    async def apply(self, request: ApplyRequest) -> ApplyReply:
        """See `EngineClient.apply`."""
        data = await self._call("POST", "/v1/apply", request, self._apply_timeout_s)
        return msgspec.msgpack.decode(data, type=ApplyReply)

    async def health(self, *, verify: bool = False) -> Health:
        """See `EngineClient.health`."""
        data = await self._call("GET", f"/v1/health?format=msgpack&verify={int(verify)}", None, 60.0)
        return msgspec.msgpack.decode(data, type=Health)

    async def drain(self) -> None:
        """See `EngineClient.drain`."""
        await self._call("POST", "/v1/drain", None, self._apply_timeout_s)

    async def close_session(self, session_id: str) -> None:
        """See `EngineClient.close_session`."""
        await self._call("POST", "/v1/close", CloseRequest(session_id), 60.0)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._http.aclose()


class Completed(msgspec.Struct, frozen=True):
    """One whole generation."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    end: GenerateEnd


async def complete(client: EngineClient, request: GenerateRequest) -> Completed:
    """Runs one generation to its end. Raises what `EngineClient.generate` raises."""
    events: list[TokenEvent] = []
    async for event in client.generate(request):
        if isinstance(event, GenerateEnd):
            if event.sampled != len(events):
                raise EngineError(f"generate {request.request_id}: {len(events)} of {event.sampled} tokens arrived")
            return Completed(
                tuple(e.token_id for e in events),
                tuple(e.logprob for e in events),
                tuple(e.policy_version for e in events),
                event,
            )
        events.append(event)
    raise EngineError(f"generate {request.request_id}: the stream ended without GenerateEnd")


class SessionRoutes:
    """Joins the rows that a session's generations deliver into routes for positions [0, session_length - 1)."""

    def __init__(self) -> None:
        self._rows: Routes | None = None

    def add(self, end: GenerateEnd) -> Routes:
        """All rows so far, [session_length - 1, layers, k], read-only. Raises IntegrityError when they are not the engine's."""
        new = np.frombuffer(end.routes, dtype=np.dtype(end.routes_dtype)).reshape(-1, *end.routes_shape_tail)
        held = 0 if self._rows is None else len(self._rows)
        if end.routes_start > held:
            raise IntegrityError(f"routes begin at row {end.routes_start} while {held} rows are held")
        rows = (
            new
            if self._rows is None or end.routes_start == 0
            else np.concatenate((self._rows[: end.routes_start], new))
        )
        if len(rows) != end.session_length - 1 or routes_digest(rows) != end.routes_digest:
            raise IntegrityError(f"{len(rows)} route rows do not have the engine's digest {end.routes_digest[:12]}")
        rows.flags.writeable = False
        self._rows = rows
        return rows


def unpack_masks(end: GenerateEnd, vocab_size: int) -> npt.NDArray[np.bool_] | None:
    """Allowed ids per sampled token, bool [sampled, vocab], or None when no grammar was applied."""
    if not end.masks:
        return None
    width = math.ceil(vocab_size / 8)
    packed = zstandard.decompress(end.masks, max_output_size=max(1, end.sampled * width))
    bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8).reshape(end.sampled, width), axis=1, count=vocab_size)
    return bits.astype(np.bool_)
