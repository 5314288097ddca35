"""Shortens a tool's output for the policy: head and tail around an explicit marker, never a silent cut.

A bound on characters and one on tokens, because a byte-level tokenizer can make either the larger. Knows no tool.
"""

from __future__ import annotations

from typing import NamedTuple

from etude.chat.tokenizer import Tokenizer


class Shown(NamedTuple):
    """The text to show and how many UTF-8 bytes of the original it leaves out."""

    text: str
    dropped_bytes: int


def _cut(text: str, keep: int) -> str:
    head = (keep + 1) // 2
    tail = keep - head
    gone = len(text) - keep
    return f"{text[:head]}\n[{gone} cut]\n{text[len(text) - tail :]}"


def shorten(text: str, tokenizer: Tokenizer, *, max_chars: int, max_tokens: int) -> Shown:
    """`text` when it fits both bounds, else its head and tail around `[N cut]`, N characters being left out.

    The result has at most `max_chars` characters and `max_tokens` tokens (or is the bare marker when even that is
    longer). Text that is not valid UTF-8 (lone surrogates) is made valid first.
    """
    clean = text.encode("utf-8", errors="replace").decode("utf-8")

    def fits(candidate: str) -> bool:
        return len(candidate) <= max_chars and len(tokenizer.encode(candidate)) <= max_tokens

    if len(clean) <= max_chars and fits(clean):
        return Shown(clean, 0)
    low, high = 0, min(len(clean) - 1, max_chars)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(_cut(clean, middle)):
            low = middle
        else:
            high = middle - 1
    kept = _cut(clean, low)
    head = (low + 1) // 2
    shown_bytes = len((clean[:head] + clean[len(clean) - (low - head) :] if low else "").encode())
    return Shown(kept, len(clean.encode()) - shown_bytes)
