"""Token masks from the tool-call grammar: which ids may come next in an action, as a function of the ids so far.

Structured calls: a tool, its fields in order, `<|end|>`. A `span` field (the `old` of an edit) walks the occurrences of
its own prefix in the viewed file and may close only where its text occurs exactly once; its `new` may not close on a
no-op or on an edit already tried. The engine applies the masks before sampling and the trainer applies the recorded
ones, so log-probabilities are those of the masked distribution on both sides. Pure; no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from etude.chat.edits import occurrences
from etude.chat.format import FIELD_TOKENS, TOOL_FIELDS, TOOL_TOKENS
from etude.chat.tokenizer import Tokenizer
from etude.records.errors import BadInput

GRAMMAR_ID = "calls-1"


class FieldGrammar(msgspec.Struct, frozen=True, array_like=True):
    """One field: its token, whether it must be there, whether it is a unique span of the source, its longest value in tokens."""

    token_id: int
    required: bool
    span: bool
    max_tokens: int


class ToolGrammar(msgspec.Struct, frozen=True, array_like=True):
    """One tool: its token and its fields in the order they are written."""

    token_id: int
    fields: tuple[FieldGrammar, ...]


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that the masks of one action depend on; travels with the request and is recorded with it."""

    tools: tuple[ToolGrammar, ...]
    source_ids: tuple[int, ...] = ()
    """Ids of the viewed file, as in the prompt; empty leaves span fields free."""
    forbidden_edits: tuple[tuple[str, str], ...] = ()
    """(old, new) texts already tried."""
    max_calls: int = 1


def make_spec(
    tokenizer: Tokenizer,
    tools: Sequence[str],
    *,
    hidden_fields: Sequence[str] = ("path", "command", "message", "start", "count"),
    source_ids: Sequence[int] = (),
    forbidden_edits: Sequence[tuple[str, str]] = (),
    max_field_tokens: int = 24,
    max_calls: int = 1,
) -> GrammarSpec:
    """The grammar of the named tools; `hidden_fields` are optional fields that the policy may not write."""
    built = []
    for name in tools:
        if name not in TOOL_FIELDS:
            raise BadInput("grammar", "tool", name, f"one of {', '.join(TOOL_FIELDS)}")
        fields = tuple(
            FieldGrammar(tokenizer.special[FIELD_TOKENS[field]], required, field == "old", max_field_tokens)
            for field, required in TOOL_FIELDS[name].items()
            if required or field not in hidden_fields
        )
        built.append(ToolGrammar(tokenizer.special[TOOL_TOKENS[name]], fields))
    return GrammarSpec(
        tools=tuple(built),
        source_ids=tuple(source_ids),
        forbidden_edits=tuple(forbidden_edits),
        max_calls=max_calls,
    )


class Grammar:
    """Masks for one action. `allowed()` gives bool [vocab]; `advance(id)` moves on and raises BadInput on a forbidden id."""

    def __init__(self, spec: GrammarSpec, tokenizer: Tokenizer) -> None:
        self._spec, self._tokenizer = spec, tokenizer
        self._vocab, self._specials = tokenizer.vocab_size, len(tokenizer.special)
        self._end = tokenizer.end_id
        self._tools = {tool.token_id: tool for tool in spec.tools}
        self._source = list(spec.source_ids)
        self._source_bytes = tokenizer.decode_bytes(self._source)
        self._starts = self._viable_starts()
        self._forbidden = {(old.encode(), new.encode()) for old, new in spec.forbidden_edits}
        self._calls = 0
        self._tool: ToolGrammar | None = None
        self._field_index = -1  # of the open field within its tool; -1 before the first
        self._value: list[int] = []
        self._ends: list[int] = []  # positions after each occurrence of the span value in the source
        self._old: bytes | None = None
        self.finished = False

    def _viable_starts(self) -> list[int]:
        """Where a span may start so that it can grow into a unique one: the file's rest from there occurs once."""
        starts, rest = [], self._source_bytes
        for start, token_id in enumerate(self._source):
            if occurrences(self._source_bytes, rest) == 1:
                starts.append(start)
            rest = rest[len(self._tokenizer.token_bytes[token_id]) :]
        return starts

    @property
    def _field(self) -> FieldGrammar | None:
        return self._tool.fields[self._field_index] if self._tool is not None and self._field_index >= 0 else None

    def _walks_source(self, field: FieldGrammar) -> bool:
        return field.span and bool(self._starts)

    def _successors(self) -> list[int]:
        """Ids that may close what is open: later fields up to the next required one, or the next call, or the end."""
        if self._tool is None:
            return [*self._tools, *([self._end] if self._calls else [])]
        following: list[int] = []
        for field in self._tool.fields[self._field_index + 1 :]:
            following.append(field.token_id)
            if field.required:
                return following
        more = list(self._tools) if self._calls < self._spec.max_calls else []
        return [*following, *more, self._end]

    def _may_close(self, field: FieldGrammar) -> bool:
        value = self._tokenizer.decode_bytes(self._value)
        if self._walks_source(field):
            return bool(self._value) and occurrences(self._source_bytes, value) == 1
        if self._old is not None:
            full = len(self._value) >= field.max_tokens
            return full or (value != self._old and (self._old, value) not in self._forbidden)
        return True

    def allowed(self) -> npt.NDArray[np.bool_]:
        """bool [vocab]: ids that may come next; all False once the action has ended."""
        mask = np.zeros(self._vocab, dtype=np.bool_)
        if self.finished:
            return mask
        field = self._field
        if field is None:
            mask[self._successors()] = True
            return mask
        if self._walks_source(field):
            for end in self._ends if self._value else self._starts:
                if end < len(self._source):
                    mask[self._source[end]] = True
        elif len(self._value) < field.max_tokens:
            mask[self._specials :] = True
        if self._may_close(field):
            mask[self._successors()] = True
        return mask

    def advance(self, token_id: int) -> None:
        """Takes the next id. Raises BadInput when the grammar forbids it."""
        field = self._field
        if token_id >= self._specials and field is not None and not self.finished:
            if self._walks_source(field):
                starts = self._ends if self._value else self._starts
                self._ends = [end + 1 for end in starts if end < len(self._source) and self._source[end] == token_id]
                if not self._ends:
                    raise BadInput("grammar", "token", token_id, "a token of the viewed file after the span so far")
            elif len(self._value) >= field.max_tokens:
                raise BadInput("grammar", "token", token_id, f"a field of at most {field.max_tokens} tokens")
            self._value.append(token_id)
            return
        closable = field is None or self._may_close(field)
        if self.finished or not closable or token_id not in self._successors():
            raise BadInput("grammar", "token", token_id, "an id that the grammar allows here")
        if field is not None and field.span:
            self._old = self._tokenizer.decode_bytes(self._value)
        if token_id == self._end:
            self.finished = True
        elif token_id in self._tools:
            self._tool, self._field_index, self._old = self._tools[token_id], -1, None
            self._calls += 1
        else:
            assert self._tool is not None
            tokens = [candidate.token_id for candidate in self._tool.fields]
            self._field_index = tokens.index(token_id)
        self._value, self._ends = [], []
