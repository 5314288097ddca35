"""The smallest edit, in tokens, that turns one file into another: what a demonstration's `edit_file` says."""

from __future__ import annotations

from collections.abc import Sequence

from etude.chat.tokenizer import Tokenizer


def occurrences(haystack: bytes, needle: bytes) -> int:
    """How often `needle` occurs in `haystack`, overlapping ones included; an empty needle occurs nowhere."""
    if not needle:
        return 0
    count, position = 0, haystack.find(needle)
    while position >= 0:
        count, position = count + 1, haystack.find(needle, position + 1)
    return count


def minimal_edit(
    tokenizer: Tokenizer, broken_ids: Sequence[int], fixed_ids: Sequence[int], *, longest: int = 24
) -> tuple[list[int], list[int]] | None:
    """`(old_ids, new_ids)`: the shortest token-aligned span of `broken_ids` that holds the whole change and whose text occurs exactly
    once in the file, with its replacement. None when the files are equal or no span of at most `longest` tokens will do."""
    broken, fixed = list(broken_ids), list(fixed_ids)
    if broken == fixed:
        return None
    limit = min(len(broken), len(fixed))
    head = 0
    while head < limit and broken[head] == fixed[head]:
        head += 1
    tail = 0
    while tail < limit - head and broken[-1 - tail] == fixed[-1 - tail]:
        tail += 1
    source = tokenizer.decode_bytes(broken)
    core = len(broken) - head - tail
    for extra in range(max(0, longest - core) + 1):
        for left in range(extra, -1, -1):
            begin, end = head - left, len(broken) - tail + extra - left
            if begin < 0 or end > len(broken) or begin >= end:
                continue
            if occurrences(source, tokenizer.decode_bytes(broken[begin:end])) == 1:
                return broken[begin:end], fixed[begin : len(fixed) - (len(broken) - end)]
    return None
