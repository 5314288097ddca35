"""Parses one sampled action into thinking, tool calls and final text; total: any ids give an Action, never an exception.

A fault of form is a named error with a text that the policy can act on. Checks form only: whether a value makes sense
is the tool registry's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from etude.chat.format import FIELD_TOKENS, THINK, TOOL_FIELDS, TOOL_TOKENS
from etude.chat.tokenizer import Tokenizer
from etude.records.rollout import Span, SpanKind


class ParsedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call as written. `error` is empty or names the fault of form in a few words."""

    name: str
    arguments: dict[str, str]
    error: str = ""


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One parsed action. Spans are relative to the first sampled token. `error` concerns the action as a whole."""

    thinking: str
    calls: tuple[ParsedCall, ...]
    text: str
    spans: tuple[Span, ...]
    error: str = ""

    @property
    def well_formed(self) -> bool:
        """No fault of form in the action or any call."""
        return not self.error and not any(call.error for call in self.calls)


class _Piece:
    """A run of plain ids behind one special id (None at the very start)."""

    def __init__(self, head: int | None, begin: int) -> None:
        self.head, self.begin, self.ids = head, begin, list[int]()


def _pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[_Piece]:
    pieces = [_Piece(None, 0)]
    for position, index in enumerate(ids):
        if 0 <= index < len(tokenizer.special):
            pieces.append(_Piece(index, position))
        else:
            pieces[-1].ids.append(index)
    return pieces


def parse_action(tokenizer: Tokenizer, sampled_ids: Sequence[int]) -> Action:
    """Parses `[<|think|>text] [text] (tool (field value)*)* <|end|>`."""
    tools = {tokenizer.special[token]: name for name, token in TOOL_TOKENS.items()}
    fields = {tokenizer.special[token]: name for name, token in FIELD_TOKENS.items()}
    think_id = tokenizer.special[THINK]
    ended = bool(sampled_ids) and sampled_ids[-1] == tokenizer.end_id
    body = sampled_ids[:-1] if ended else sampled_ids
    error = "" if ended else "action not ended"
    thinking: list[int] = []
    text: list[int] = []
    spans: list[Span] = []
    calls: list[ParsedCall] = []
    name, arguments, fault, call_begin = "", dict[str, str](), "", 0

    def close_call(end: int) -> None:
        nonlocal name
        if not name:
            return
        missing = [field for field, required in TOOL_FIELDS[name].items() if required and field not in arguments]
        problem = fault or (f"missing {missing[0]}" if missing else "")
        calls.append(ParsedCall(name=name, arguments=dict(arguments), error=problem))
        spans.append(Span(call_begin, end, SpanKind.TOOL_CALL))
        name = ""

    for piece in _pieces(tokenizer, body):
        end = piece.begin + len(piece.ids) + (piece.head is not None)
        if piece.head is None:
            text.extend(piece.ids)
            if piece.ids:
                spans.append(Span(0, end, SpanKind.FINAL))
        elif piece.head in tools:
            close_call(piece.begin)
            name, arguments, fault, call_begin = tools[piece.head], {}, "", piece.begin
            if piece.ids:
                fault = "text outside a field"
        elif piece.head in fields and name:
            field = fields[piece.head]
            if field not in TOOL_FIELDS[name]:
                fault = fault or f"unknown {field}"
            elif field in arguments:
                fault = fault or f"repeated {field}"
            arguments[field] = tokenizer.decode(piece.ids)
            if not fault and "�" in arguments[field]:
                fault = f"{field} not UTF-8"
        elif piece.head == think_id and not calls and not name:
            thinking.extend(piece.ids)
            spans.append(Span(piece.begin, end, SpanKind.THINKING))
        else:
            error = error or "unexpected token"
    close_call(len(body))
    if text and calls:
        error = error or "text before a call"
    return Action(
        thinking=tokenizer.decode(thinking),
        calls=tuple(calls),
        text=tokenizer.decode(text),
        spans=tuple(spans),
        error=error,
    )
