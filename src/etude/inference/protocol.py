"""The one engine protocol (DESIGN decision 12): the same messages in process and over HTTP.

Token ids in, token ids out; knows nothing of text, of torch or of sockets. A generation is a stream of `TokenEvent`
ended by one `GenerateEnd`, or cut short by one `EngineFault`. Frames on a byte stream are a little-endian uint32 length
and the MessagePack of one tagged message; runs of tokens travel as one `TokenRun`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt

from etude.chat.grammar import GrammarSpec
from etude.records.errors import BadInput, EngineError, EtudeError, IntegrityError, PrefixMismatch

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 64 << 20


class SwapMode(StrEnum):
    """What becomes of the sessions' pages at a swap (DESIGN decision 9)."""

    KEEP = "keep"
    """Pages stay and running sessions go on over them; each token is stamped with the version that made it."""
    RECOMPUTE = "recompute"
    """Every session's pages are made again from its ids under the new weights before its next token."""


class Finish(StrEnum):
    """Why sampling ended."""

    STOP = "stop"
    """One of `stop_ids` was sampled; it is the last token."""
    LENGTH = "length"
    """`max_tokens` were sampled."""


class FaultKind(StrEnum):
    """Why the engine refused or cut a generation."""

    PREFIX_MISMATCH = "prefix_mismatch"
    """The engine does not hold the session at that prefix: open a new session with all ids."""
    BUSY = "busy"
    """No slot came free in time, or the wait queue is full."""
    TOO_LONG = "too_long"
    """Prompt and `max_tokens` do not fit a session."""
    DRAINING = "draining"
    """The engine is being drained and takes no new work."""
    BAD_REQUEST = "bad_request"
    """The request cannot be served as written; the message names the field."""
    CANCELLED = "cancelled"
    """The session was closed while the request ran."""
    INTEGRITY = "integrity"
    """The weights are not those of a manifest: the engine is fenced."""
    FAILED = "failed"
    """The engine or an apply failed; the message says how."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Continue a session by `new_token_ids`, then sample.

    `prefix_digest` is `prefix_digest(ids)` of all ids that the session holds so far (prompt and sampled, in order), of
    the empty sequence for a new session. The digest of an empty prefix on a known session starts it anew.
    """

    request_id: str
    session_id: str
    prefix_digest: str
    new_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    """0 is greedy; log-probabilities are then those at temperature 1."""
    seed: int = 0
    """The draw of sampled token i depends only on (seed, i)."""
    stop_ids: tuple[int, ...] = ()
    grammar: GrammarSpec | None = None


class TokenEvent(msgspec.Struct, frozen=True, tag="token"):
    """One sampled token, its log-probability under the sampling distribution, the version of the weights that made it."""

    token_id: int
    logprob: float
    policy_version: int


class TokenRun(msgspec.Struct, frozen=True, tag="tokens"):
    """Consecutive token events in columns (the wire form of many `TokenEvent`)."""

    token_ids: list[int]
    logprobs: list[float]
    policy_versions: list[int]

    def events(self) -> Iterator[TokenEvent]:
        """The events that this run stands for, in order."""
        for token_id, logprob, version in zip(self.token_ids, self.logprobs, self.policy_versions, strict=True):
            yield TokenEvent(token_id, logprob, version)


class GenerateEnd(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """The end of a generation. The session now holds `session_length` ids, of which all but the last have routes.

    `routes` are C-order bytes of [session_length - 1 - routes_start, *routes_shape_tail]: the rows not delivered before,
    or again from 0 after a `recompute`. `routes_digest` is the sha256 hex of all rows [0, session_length - 1).
    `masks` is the zstd of uint8 [sampled, ceil(vocab / 8)] (`numpy.packbits` of the allowed ids), empty without grammar.
    """

    finish: Finish
    sampled: int
    routes_digest: str
    routes_start: int
    routes: bytes
    routes_shape_tail: tuple[int, int]
    """(MoE layers, experts per token)."""
    routes_dtype: str
    masks: bytes
    session_length: int
    engine_id: str


class EngineFault(msgspec.Struct, frozen=True, tag="fault"):
    """The engine refused or failed; see `FaultKind`."""

    kind: FaultKind
    message: str


class ApplyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fetch, verify and swap in the version of a manifest."""

    manifest_key: str
    mode: SwapMode = SwapMode.KEEP


class ApplyReply(msgspec.Struct, frozen=True, kw_only=True, tag="applied"):
    """The version now served, the digest of the tensors that the forward reads, and how long it took.

    `pause_seconds` is the part in which no token was sampled (swap and digest).
    """

    policy_version: int
    digest: str
    seconds: float
    pause_seconds: float = 0.0


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself."""

    protocol: int = PROTOCOL_VERSION
    engine_id: str
    policy_version: int
    digest: str
    """Root digest of the live tensors, as of the last swap (or of this call when it asked to verify)."""
    manifest_key: str
    sessions: int
    slots: int
    free_slots: int
    running: int
    waiting: int
    tokens_sampled: int
    tokens_prefilled: int
    """Prompt tokens computed."""
    tokens_shared: int
    """Prompt tokens whose pages were copied from a session that began alike."""
    steps: int
    max_session_tokens: int
    busy: bool
    draining: bool
    fenced: str
    """Why the engine refuses to serve, or empty."""


class CloseRequest(msgspec.Struct, frozen=True):
    """Forget a session and free its slot."""

    session_id: str


GenerationEvent = TokenEvent | GenerateEnd
StreamMessage = TokenRun | GenerateEnd | EngineFault


class EngineRefused(EngineError):
    """An `EngineFault` as an exception; `kind` says which."""

    def __init__(self, kind: FaultKind, message: str) -> None:
        self.kind, self.message = kind, message
        super().__init__(f"{kind}: {message}")


def fault_error(fault: EngineFault) -> EtudeError:
    """The exception that a client raises for a fault: PrefixMismatch, IntegrityError, else EngineRefused."""
    if fault.kind is FaultKind.PREFIX_MISMATCH:
        return PrefixMismatch(f"{fault.kind}: {fault.message}")
    if fault.kind is FaultKind.INTEGRITY:
        return IntegrityError(fault.message)
    return EngineRefused(fault.kind, fault.message)


def prefix_digest(ids: Sequence[int]) -> str:
    """sha256 hex of the ids as little-endian uint32."""
    return hashlib.sha256(np.asarray(ids, dtype="<u4").tobytes()).hexdigest()


def routes_digest(routes: npt.NDArray[np.unsignedinteger]) -> str:
    """sha256 hex of the C-order bytes of routes [positions, layers, k]."""
    return hashlib.sha256(np.ascontiguousarray(routes).tobytes()).hexdigest()


_encoder = msgspec.msgpack.Encoder()
_stream_decoder = msgspec.msgpack.Decoder(StreamMessage)


def encode_frame(message: StreamMessage) -> bytes:
    """Length-prefixed MessagePack of one message."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


class FrameReader:
    """Cuts a byte stream back into messages. Raises BadInput on a frame that no engine of this protocol writes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[StreamMessage]:
        """Messages completed by `data`."""
        self._buffer += data
        messages: list[StreamMessage] = []
        offset = 0
        while len(self._buffer) - offset >= 4:
            size = int.from_bytes(self._buffer[offset : offset + 4], "little")
            if size > MAX_FRAME_BYTES:
                raise BadInput("engine stream", "frame length", size, f"at most {MAX_FRAME_BYTES} bytes")
            if len(self._buffer) - offset - 4 < size:
                break
            body = bytes(self._buffer[offset + 4 : offset + 4 + size])
            try:
                messages.append(_stream_decoder.decode(body))
            except msgspec.DecodeError as error:
                raise BadInput("engine stream", "frame", f"{size} bytes", f"a protocol message ({error})") from error
            offset += 4 + size
        del self._buffer[:offset]
        return messages
