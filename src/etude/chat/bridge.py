"""The append-only bridge from conversation to token ids (DESIGN decision 1): the next prompt is the previous ids plus new ids.

Nothing here decodes sampled tokens; a sampled id stays what it was. Returns spans so that every token has a kind.
"""

from __future__ import annotations

from collections.abc import Sequence

from etude.chat.format import ASSISTANT, BOS, END, FILE, SYSTEM, TOOL, USER
from etude.chat.tokenizer import Tokenizer
from etude.records.rollout import Span, SpanKind


class _Writer:
    def __init__(self, tokenizer: Tokenizer, start: int) -> None:
        self.tokenizer, self.start = tokenizer, start
        self.ids: list[int] = []
        self.spans: list[Span] = []

    def message(self, role: str, parts: Sequence[Sequence[int]], kind: SpanKind) -> None:
        begin = self.start + len(self.ids)
        self.ids.append(self.tokenizer.special[role])
        for part in parts:
            self.ids.extend(part)
        self.ids.append(self.tokenizer.end_id)
        self.spans.append(Span(begin, self.start + len(self.ids), kind))

    def open_action(self) -> None:
        begin = self.start + len(self.ids)
        self.ids.append(self.tokenizer.special[ASSISTANT])
        self.spans.append(Span(begin, begin + 1, SpanKind.SYSTEM))


def file_parts(tokenizer: Tokenizer, path: str, text: str) -> tuple[list[int], list[int]]:
    """Ids of a viewed file's heading and of its text; the second are the `source_ids` of the edit grammar."""
    return tokenizer.encode(path + "\n"), tokenizer.encode(text)


def first_prompt(
    tokenizer: Tokenizer,
    *,
    system: str,
    instruction: str,
    files: Sequence[tuple[str, str]] = (),
    past_user_messages: Sequence[str] = (),
) -> tuple[list[int], list[Span]]:
    """Ids and spans of the opening prompt (SPEC H2): system message, recently viewed files, past user messages, the task."""
    writer = _Writer(tokenizer, 0)
    writer.ids.append(tokenizer.special[BOS])
    writer.spans.append(Span(0, 1, SpanKind.SYSTEM))
    writer.message(SYSTEM, [tokenizer.encode(system)], SpanKind.SYSTEM)
    for message in past_user_messages:
        writer.message(USER, [tokenizer.encode(message)], SpanKind.USER)
    writer.message(USER, [tokenizer.encode(instruction)], SpanKind.USER)
    for path, text in files:
        writer.message(FILE, file_parts(tokenizer, path, text), SpanKind.USER)
    writer.open_action()
    return writer.ids, writer.spans


def append_results(
    tokenizer: Tokenizer, sampled_ids: Sequence[int], results: Sequence[str], *, start: int
) -> tuple[list[int], list[Span]]:
    """New ids and spans after an action: a closing `<|end|>` if sampling stopped at its length limit, each call's result, and the
    opening of the next action. `start` is the number of ids so far (prompt + sampled), where the spans begin."""
    writer = _Writer(tokenizer, start)
    if not sampled_ids or sampled_ids[-1] != tokenizer.end_id:
        writer.ids.append(tokenizer.special[END])
        writer.spans.append(Span(start, start + 1, SpanKind.SYSTEM))
    for result in results:
        writer.message(TOOL, [tokenizer.encode(result)], SpanKind.TOOL_OUTPUT)
    writer.open_action()
    return writer.ids, writer.spans
