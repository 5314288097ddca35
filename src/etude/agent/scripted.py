"""An engine client that answers from a script instead of a policy: for demonstrations, and for tests of the loop.

Keeps the protocol's rules (prefix digests, repeated request ids, one end message) so that a rollout cannot tell the
difference; its tokens have log-probability 0 and no routes or masks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from etude.chat.grammar import Grammar
from etude.chat.tokenizer import Tokenizer
from etude.inference.protocol import (
    ApplyReply,
    ApplyRequest,
    EngineRefused,
    FaultKind,
    Finish,
    GenerateEnd,
    GenerateRequest,
    GenerationEvent,
    Health,
    TokenEvent,
    prefix_digest,
)
from etude.records.errors import PrefixMismatch

Script = Callable[[tuple[int, ...]], Sequence[int]]
"""The next action's ids, given all ids before it."""


class ScriptedEngine:
    """An `EngineClient` for one script. With `tokenizer`, an action that the request's grammar forbids raises BadInput."""

    def __init__(self, script: Script, *, tokenizer: Tokenizer | None = None, policy_version: int = 0) -> None:
        self._script, self._tokenizer, self._version = script, tokenizer, policy_version
        self._sessions: dict[str, tuple[int, ...]] = {}
        self._answered: dict[str, tuple[tuple[int, ...], GenerateEnd]] = {}
        self.sampled = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationEvent]:
        """See `EngineClient.generate`."""
        if request.request_id not in self._answered:
            self._answered[request.request_id] = self._answer(request)
        ids, end = self._answered[request.request_id]
        for token_id in ids:
            yield TokenEvent(token_id, 0.0, self._version)
        yield end

    def _answer(self, request: GenerateRequest) -> tuple[tuple[int, ...], GenerateEnd]:
        held = self._sessions.get(request.session_id, ())
        if request.prefix_digest == prefix_digest(()):
            held = ()
        if request.prefix_digest != prefix_digest(held):
            raise PrefixMismatch(f"session {request.session_id} holds {len(held)} other ids")
        if request.max_tokens <= 0:
            raise EngineRefused(FaultKind.BAD_REQUEST, f"max_tokens is {request.max_tokens}")
        prompt = held + request.new_token_ids
        sampled: list[int] = []
        for token_id in list(self._script(prompt))[: request.max_tokens]:
            sampled.append(token_id)
            if token_id in request.stop_ids:
                break
        if request.grammar is not None and self._tokenizer is not None:
            grammar = Grammar(request.grammar, self._tokenizer)
            for token_id in sampled:
                grammar.advance(token_id)
        ids = tuple(sampled)
        self._sessions[request.session_id] = prompt + ids
        self.sampled += len(ids)
        stopped = bool(ids) and ids[-1] in request.stop_ids
        return ids, GenerateEnd(
            finish=Finish.STOP if stopped else Finish.LENGTH,
            sampled=len(ids),
            routes_digest="",
            routes_start=0,
            routes=b"",
            routes_shape_tail=(0, 0),
            routes_dtype="uint8",
            masks=b"",
            session_length=len(prompt) + len(ids),
            engine_id="script",
        )

    async def apply(self, request: ApplyRequest) -> ApplyReply:
        """Refused: a script has no weights."""
        raise EngineRefused(FaultKind.BAD_REQUEST, f"a script has no weights to take from {request.manifest_key}")

    async def health(self, *, verify: bool = False) -> Health:
        """See `EngineClient.health`."""
        return Health(
            engine_id="script",
            policy_version=self._version,
            digest="",
            manifest_key="",
            sessions=len(self._sessions),
            slots=1,
            free_slots=1,
            running=0,
            waiting=0,
            tokens_sampled=self.sampled,
            tokens_prefilled=0,
            tokens_shared=0,
            steps=0,
            max_session_tokens=1 << 20,
            busy=False,
            draining=False,
            fenced="",
        )

    async def drain(self) -> None:
        """Nothing runs between calls."""

    async def close_session(self, session_id: str) -> None:
        """Forgets the session."""
        self._sessions.pop(session_id, None)

    async def aclose(self) -> None:
        """Nothing to free."""
