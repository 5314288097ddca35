"""One generation in flight, and the memory of ended ones by which a repeated request id never samples twice.

Thread-confined to the engine's loop, but for `new_job`, which any thread may call. Knows nothing of slots or torch.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt
import zstandard

from etude.chat.grammar import GrammarSpec
from etude.inference.cache import Session
from etude.inference.protocol import (
    EngineFault,
    EngineRefused,
    FaultKind,
    Finish,
    GenerateEnd,
    GenerateRequest,
    StreamMessage,
    TokenRun,
)
from etude.inference.sampler import Doubles, uniforms
from etude.records.errors import BadInput


class MaskState(Protocol):
    """Token masks of one action (`chat.grammar.Grammar`)."""

    finished: bool

    def allowed(self) -> npt.NDArray[np.bool_]:
        """bool [vocab]: ids that may come next."""
        ...

    def advance(self, token_id: int) -> None:
        """Takes the sampled id."""
        ...


GrammarFactory = Callable[[GrammarSpec], MaskState]


class Sink(Protocol):
    """Where a job's messages go; `send` is called on the engine's thread and must not block."""

    def send(self, messages: list[StreamMessage]) -> None: ...


class JobState(StrEnum):
    """Where a generation is."""

    WAITING = "waiting"
    RUNNING = "running"
    SUSPENDED = "suspended"
    ENDED = "ended"


@dataclass(eq=False, slots=True)
class Job:
    """One generation: its request, its draws and what came of it so far."""

    request: GenerateRequest
    grammar: MaskState | None
    uniforms: Doubles
    stop: frozenset[int]
    deadline: float = math.inf
    """Until when it may wait for a slot."""
    state: JobState = JobState.WAITING
    session: Session | None = None
    base: int = 0
    """Ids that the session held before this request."""
    turn: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    masks: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    next_mask: npt.NDArray[np.bool_] | None = None
    """Ids that the grammar allows next, once asked for."""
    finish: Finish | None = None
    """Why sampling is over. The job ends when all ids but the last have pages."""
    flushed: int = 0
    sinks: list[Sink] = field(default_factory=list)
    end: GenerateEnd | None = None

    @property
    def due(self) -> int:
        """Ids to feed: those without a page, but for the last one when nothing is sampled after it."""
        assert self.session is not None
        return self.session.pending - (self.finish is not None)

    def mask(self) -> npt.NDArray[np.bool_] | None:
        """bool [vocab]: ids that the grammar allows next; None without a grammar."""
        if self.next_mask is None and self.grammar is not None:
            self.next_mask = self.grammar.allowed()
        return self.next_mask

    def forced(self) -> int | None:
        """The next id where the grammar leaves no choice: it needs no forward and has log-probability 0."""
        mask = self.mask()
        return None if mask is None or np.count_nonzero(mask) != 1 else int(mask.argmax())

    def take(self, token_id: int, logprob: float, policy_version: int) -> None:
        """Appends a sampled id, to the session too, and sets `finish` when it is the last one. Raises BadInput if masked."""
        assert self.session is not None
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.policy_versions.append(policy_version)
        self.session.ids.append(token_id)
        ended = token_id in self.stop
        if self.grammar is not None:
            self.next_mask = None
            self.grammar.advance(token_id)
            ended = ended or self.grammar.finished
        if ended:
            self.finish = Finish.STOP
        elif len(self.token_ids) == self.request.max_tokens:
            self.finish = Finish.LENGTH

    def run(self, start: int, stop: int) -> list[StreamMessage]:
        """Sampled tokens [start, stop) as at most one message."""
        if start >= stop:
            return []
        return [TokenRun(self.token_ids[start:stop], self.logprobs[start:stop], self.policy_versions[start:stop])]

    def flush(self) -> None:
        """Sends what was sampled since the last flush."""
        messages = self.run(self.flushed, len(self.token_ids))
        self.flushed = len(self.token_ids)
        if messages:
            for sink in self.sinks:
                sink.send(messages)

    def attach(self, sink: Sink) -> None:
        """Adds a reader, which first gets all that was sent before; an ended job sends all it has."""
        if self.end is not None:
            sink.send([*self.run(0, len(self.token_ids)), self.end])
            return
        self.sinks.append(sink)
        if sent := self.run(0, self.flushed):
            sink.send(sent)

    def packed_masks(self) -> bytes:
        """zstd of uint8 [sampled, ceil(vocab / 8)], or empty without a grammar."""
        return zstandard.compress(np.stack(self.masks).tobytes(), 1) if self.masks else b""


def new_job(request: GenerateRequest, *, vocab_size: int, max_tokens: int, grammars: GrammarFactory | None) -> Job:
    """A job for a request, checked as far as the request alone allows. Raises EngineRefused (bad_request, too_long)."""

    def refuse(name: str, value: object, expected: str) -> EngineRefused:
        return EngineRefused(
            FaultKind.BAD_REQUEST, str(BadInput(request.request_id or "request", name, value, expected))
        )

    if not request.request_id or not request.session_id:
        raise refuse("request_id, session_id", (request.request_id, request.session_id), "two names")
    if request.max_tokens < 1:
        raise refuse("max_tokens", request.max_tokens, "at least 1")
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise refuse("temperature", request.temperature, "a finite number, at least 0")
    if request.seed < 0:
        raise refuse("seed", request.seed, "a number, at least 0")
    outside = next((i for i in (*request.new_token_ids, *request.stop_ids) if not 0 <= i < vocab_size), None)
    if outside is not None:
        raise refuse("token id", outside, f"an id below {vocab_size}")
    if len(request.new_token_ids) + request.max_tokens > max_tokens:
        raise EngineRefused(
            FaultKind.TOO_LONG,
            f"{len(request.new_token_ids)} new ids and {request.max_tokens} to sample; a session holds {max_tokens}",
        )
    grammar: MaskState | None = None
    if request.grammar is not None:
        if grammars is None:
            raise refuse("grammar", "a grammar", "none: this engine was started without a tokenizer")
        try:
            grammar = grammars(request.grammar)
        except (BadInput, ValueError, IndexError, KeyError) as error:
            raise refuse("grammar", "a grammar", f"one that this tokenizer can follow ({error})") from error
    return Job(request, grammar, uniforms(request.seed, request.max_tokens), frozenset(request.stop_ids))


class Ledger:
    """Jobs by request id: all live ones, and the last `capacity` that ended."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._live: dict[str, Job] = {}
        self._ended: OrderedDict[str, Job] = OrderedDict()

    def find(self, request_id: str) -> Job | None:
        """The job of that id, live or remembered."""
        return self._live.get(request_id) or self._ended.get(request_id)

    def live(self) -> list[Job]:
        """Jobs that have not ended, in order of arrival."""
        return list(self._live.values())

    def add(self, job: Job) -> None:
        """Takes up a job that has just arrived."""
        self._live[job.request.request_id] = job

    def finish(self, job: Job) -> None:
        """Moves a job that reached its end into the memory of ended ones."""
        self._live.pop(job.request.request_id, None)
        self._ended[job.request.request_id] = job
        while len(self._ended) > self._capacity:
            self._ended.popitem(last=False)

    def drop(self, job: Job) -> None:
        """Forgets a job that did not reach its end: the id may be used again."""
        self._live.pop(job.request.request_id, None)


def fault_job(job: Job, kind: FaultKind, message: str) -> None:
    """Ends a job with a fault, after the tokens it has."""
    job.flush()
    for sink in job.sinks:
        sink.send([EngineFault(kind, message)])
    job.sinks.clear()
    job.state = JobState.ENDED
