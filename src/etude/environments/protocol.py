"""The host's side of the pod protocol: typed messages, frames, and a link that multiplexes requests by id.

A frame is a 4-byte big-endian length and a MessagePack map; requests carry `id` and `verb`, replies `id`, `ok`, `error`, `message`,
`body`. The pod is not trusted: replies are decoded into types, frames are bounded, an unexpected one closes the link.
Knows nothing of processes. DESIGN decision 11.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from etude.environments.pod import PodRefused
from etude.records.errors import PodLost

PROTOCOL = 1
MAX_FRAME = 96 << 20


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="verb"):
    """A request; its tag is the verb."""

    id: str


class Hello(Request, tag="hello", frozen=True, kw_only=True):
    version: int
    workdir: str
    env: dict[str, str]
    files: list[tuple[str, int, bytes]]
    """(path, mode, content): what the task places; edits can refer to it."""


class Exec(Request, tag="exec", frozen=True, kw_only=True):
    argv: list[str]
    cwd: str
    env: dict[str, str]
    stdin: bytes
    timeout_ms: int
    output_limit: int
    channel_limit: int
    background: bool = False
    merge: bool = False


class Attach(Request, tag="attach", frozen=True, kw_only=True):
    handle: str


class Signal(Request, tag="signal", frozen=True, kw_only=True):
    target: str
    signal: int


class Processes(Request, tag="ps", frozen=True, kw_only=True):
    pass


class Read(Request, tag="read", frozen=True, kw_only=True):
    path: str
    limit: int


class Write(Request, tag="write", frozen=True, kw_only=True):
    path: str
    data: bytes
    mode: int


class Stat(Request, tag="stat", frozen=True, kw_only=True):
    path: str


class TarIn(Request, tag="tar_in", frozen=True, kw_only=True):
    data: bytes


class TarOut(Request, tag="tar_out", frozen=True, kw_only=True):
    paths: list[str]
    limit: int


class Call(Request, tag="call", frozen=True, kw_only=True):
    tool: str
    arguments: dict[str, object]
    options: dict[str, object]


class HelloReply(msgspec.Struct, frozen=True):
    version: int
    python: str
    verbs: list[str]


class Empty(msgspec.Struct, frozen=True):
    pass


class ExecReply(msgspec.Struct, frozen=True):
    exit_code: int | None
    signal: int | None
    timed_out: bool
    stdout: bytes
    stderr: bytes
    dropped_stdout: int
    dropped_stderr: int
    channel: bytes
    dropped_channel: int
    duration_us: int


class StartReply(msgspec.Struct, frozen=True):
    handle: str
    pid: int


class AttachReply(msgspec.Struct, frozen=True):
    running: bool
    result: ExecReply


class ProcessesReply(msgspec.Struct, frozen=True):
    pids: list[int]
    zombies: int


class ReadReply(msgspec.Struct, frozen=True):
    data: bytes
    mode: int


class StatReply(msgspec.Struct, frozen=True):
    kind: str
    size: int
    mode: int
    mtime_ns: int


class TarInReply(msgspec.Struct, frozen=True):
    files: list[str]


class TarOutReply(msgspec.Struct, frozen=True):
    data: bytes


class CallReply(msgspec.Struct, frozen=True):
    ok: bool
    text: str
    error: str
    changed: list[str]
    timed_out: bool
    oom: bool
    dropped: int
    exit_code: int | None = None
    signal: int | None = None


class _Envelope(msgspec.Struct, frozen=True):
    id: str
    ok: bool
    error: str
    message: str
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(_Envelope)
R = TypeVar("R")


def frame(message: msgspec.Struct) -> bytes:
    """Bytes of one frame. Raises ValueError when the message is longer than a frame may be."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"message of {len(body)} bytes; a frame holds {MAX_FRAME}")
    return len(body).to_bytes(4, "big") + body


class Link(asyncio.Protocol):
    """One channel to a pod's agent: sends requests, hands each reply to the one who waits for its id."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._inbox = bytearray()
        self._waiting: dict[str, asyncio.Future[_Envelope]] = {}
        self._lost: str = ""
        self.closed = asyncio.get_running_loop().create_future()

    # ---- asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        inbox = self._inbox
        inbox += data
        while len(inbox) >= 4:
            size = int.from_bytes(inbox[:4], "big")
            if size > MAX_FRAME:
                self.abort(f"the pod sent a frame of {size} bytes")
                return
            if len(inbox) < size + 4:
                return
            body = bytes(memoryview(inbox)[4 : size + 4])
            del inbox[: size + 4]
            try:
                envelope = _envelopes.decode(body)
            except msgspec.DecodeError as error:
                self.abort(f"the pod sent no message of the protocol ({error})")
                return
            if not envelope.id:
                self.abort(f"the pod's agent failed: {envelope.message}")
                return
            future = self._waiting.get(envelope.id)
            if future is not None and not future.done():
                future.set_result(envelope)

    def connection_lost(self, exc: Exception | None) -> None:
        self.abort(f"the pod's channel ended ({exc})" if exc else "the pod's channel ended")

    # ---- requests
    def abort(self, reason: str) -> None:
        """Closes the channel; every waiting and later request raises PodLost with `reason`."""
        if not self._lost:
            self._lost = reason
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(PodLost(reason))
            if not self.closed.done():
                self.closed.set_result(reason)
        if self._transport is not None:
            self._transport.abort()

    @property
    def connected(self) -> bool:
        """Whether a transport was made; it owns the socket from then on."""
        return self._transport is not None

    @property
    def lost(self) -> str:
        """Why the channel is gone, empty while it lives."""
        return self._lost

    async def request(self, message: Request, reply: type[R], timeout_s: float) -> R:
        """Sends `message` and waits for its reply. Raises PodRefused, or PodLost when the pod is gone or silent for `timeout_s`.

        A second request with an id that is still in flight waits for the same reply.
        """
        if self._lost:
            raise PodLost(self._lost)
        assert self._transport is not None
        future = self._waiting.get(message.id)
        first = future is None
        if future is None:
            data = frame(message)
            future = self._waiting[message.id] = asyncio.get_running_loop().create_future()
            # an exception set while nobody waits any more is no fault
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._transport.write(data)
        try:
            envelope = await asyncio.wait_for(asyncio.shield(future), timeout_s)
        except TimeoutError:
            self.abort(f"the pod did not answer {type(message).__name__} within {timeout_s:g} s")
            raise PodLost(self._lost) from None
        finally:
            if first:
                self._waiting.pop(message.id, None)
        if not envelope.ok:
            raise PodRefused(envelope.error, envelope.message)
        try:
            return msgspec.msgpack.decode(envelope.body, type=reply)
        except msgspec.DecodeError as error:
            reason = f"the pod's reply to {type(message).__name__} is none ({error})"
            self.abort(reason)
            raise PodLost(reason) from error
