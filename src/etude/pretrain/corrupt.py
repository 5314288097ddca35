"""Small textual corruptions of a Python function: the raw material of several-bug denoising.

Each is a span of characters and its replacement, outside string literals: an operator, a comparison, a digit, a keyword, a twin
name. They mimic the mutation operators of `tasks` without parsing, so one function gives dozens. Whether a corruption changes
behaviour is not known here and does not matter: the original text is the target.
"""

from __future__ import annotations

import keyword
import random
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Change(NamedTuple):
    """Characters [begin, end) of the source become `text`."""

    begin: int
    end: int
    text: str


_LEXEME = re.compile(
    r"""(?P<string>[rbfuRBFU]{0,2}(?:'''(?:\\.|[^\\])*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\"|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"))"""
    r"|(?P<phrase> is not | not in | is | in (?=[^\n]*[:\])])| not )"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<number>\d[\w.]*)"
    r"|(?P<operator>\*\*|//|<<|>>|[<>=!]=|[-+*/%&|^<>])"
)

_SWAPS: dict[str, tuple[str, ...]] = {
    "<": (">=", "<="), ">=": ("<", ">"), ">": ("<=", ">="), "<=": (">", "<"), "==": ("!=",), "!=": ("==",),
    "+": ("-",), "-": ("+",), "*": ("//", "+"), "//": ("*", "/"), "/": ("*",), "%": ("//",), "**": ("*",),
    "<<": (">>",), ">>": ("<<",), "&": ("|",), "|": ("&",), "^": ("|",),
    " is not ": (" is ",), " is ": (" is not ",), " not in ": (" in ",), " in ": (" not in ",), " not ": (" ",),
    "and": ("or",), "or": ("and",), "True": ("False",), "False": ("True",), "None": ("0",),
    "break": ("continue",), "continue": ("break",),
    "min": ("max",), "max": ("min",), "any": ("all",), "all": ("any",), "lower": ("upper",), "upper": ("lower",),
    "startswith": ("endswith",), "endswith": ("startswith",), "lstrip": ("rstrip",), "rstrip": ("lstrip",),
    "append": ("extend",), "extend": ("append",), "keys": ("values",), "values": ("keys",), "find": ("rfind",),
    "split": ("rsplit",), "index": ("rindex",), "floor": ("ceil",), "ceil": ("floor",), "sin": ("cos",), "cos": ("sin",),
}  # fmt: skip
_OPERATORS = ("<", "<=", ">", ">=", "==", "!=", "+", "-", "*", "//", "%")
_WORDS = frozenset(
    ["return", "and", "or", "not", "in", "is", "if", "else", "yield", "lambda", "for", "while", "assert"]
)
_OPERANDS = re.compile(r"(?<![\w.'\"] )(?<![\w.'\"])(\w+) (-|/|//|%|\*\*) (\w+)(?![\w.(\['\"])")
_ARGUMENTS = re.compile(r"(?<=\w\()([\w.]+), ([\w.]+)(?=[,)])")
_SLICE = re.compile(r"(?<=[\w\])])\[(-?\w*):(-?\w*)\]")
_NEGATIVE = re.compile(r"(?:(?<=[(\[:,=] )|(?<=[(\[:])|(?<=return ))-(?=\w)")
_LOOP_IN = re.compile(r"\bfor\b[^\n]*$")


def corruptions(source: str) -> list[Change]:
    """Every corruption that the table offers, below the first line (the `def`), in order of place."""
    body = source.find("\n")
    found: list[Change] = []
    strings: list[tuple[int, int]] = []
    for match in _LEXEME.finditer(source, body if body >= 0 else len(source)):
        text, begin, end = match.group(), match.start(), match.end()
        if match.lastgroup == "string":
            strings.append((begin, end))
            continue
        if match.lastgroup == "number":
            found += [Change(begin, end, new) for new in _other_numbers(text)]
        elif text == " in " and _LOOP_IN.search(source[source.rfind("\n", 0, begin) + 1 : begin]):
            continue
        elif text in ("*", "**", "-") and source[begin - 1] in "(,[={ " and source[end : end + 1] not in (" ", "="):
            continue
        elif text in ("if", "while"):
            if source[end : end + 5] != " not ":
                found.append(Change(end, end, " not"))
        elif text == "return":
            line_end = source.find("\n", end)
            line_end = len(source) if line_end < 0 else line_end
            if end < line_end and source[end:line_end].strip() != "None":
                found.append(Change(end, line_end, ""))
        else:
            found += [Change(begin, end, new) for new in _SWAPS.get(text, ())]
    return found + [change for change in _rearrangements(source, max(body, 0)) if not _inside(change, strings)]


def slips(rng: random.Random, source: str, count: int) -> list[Change]:
    """Up to `count` random slips below the first line: a name, number or operator where another one of the function belongs.

    Wider than `corruptions` and blind to meaning: any name may stand for any other. At most one slip a place.
    """
    body = source.find("\n")
    lexemes = [m for m in _LEXEME.finditer(source) if m.lastgroup not in ("string", "phrase")]
    words = {
        kind: sorted({m.group() for m in lexemes if m.lastgroup == kind and not keyword.iskeyword(m.group())})
        for kind in ("name", "number", "operator")
    }
    words["number"] += [str(n) for n in range(4) if str(n) not in words["number"]]
    words["operator"] += [text for text in _OPERATORS if text not in words["operator"]]
    places = [m for m in lexemes if m.start() > body >= 0 and m.group() in words[str(m.lastgroup)]]
    found = []
    for match in rng.sample(places, min(count, len(places))):
        others = [text for text in words[str(match.lastgroup)] if text != match.group()]
        if others:
            found.append(Change(match.start(), match.end(), rng.choice(others)))
    return found


def _rearrangements(source: str, body: int) -> Iterator[Change]:
    """Swapped operands and arguments, slices with another bound, a sign dropped; may lie inside a string."""
    for match in _OPERANDS.finditer(source, body):
        left, operator, right = match.groups()
        if left != right and left not in _WORDS and right not in _WORDS:
            yield Change(match.start(), match.end(), f"{right} {operator} {left}")
    for match in _ARGUMENTS.finditer(source, body):
        if match[1] != match[2]:
            yield Change(match.start(), match.end(), f"{match[2]}, {match[1]}")
    for match in _SLICE.finditer(source, body):
        lower, upper = match.groups()
        if lower and upper:
            others = [f"{lower}:"]
        elif lower:
            others = [f"{lower}:-1", ":"]
        else:
            others = [f"1:{upper}"] if upper else []
        yield from (Change(match.start(), match.end(), f"[{other}]") for other in others)
    for match in _NEGATIVE.finditer(source, body):
        yield Change(match.start(), match.end(), "")


def _inside(change: Change, spans: Sequence[tuple[int, int]]) -> bool:
    return any(change.begin < end and begin < change.end for begin, end in spans)


def _other_numbers(text: str) -> list[str]:
    if not text.isdigit() or len(text) > 6:
        return []
    value = int(text)
    return [str(other) for other in (value + 1, value - 1) if other >= 0]


def line_change(source: str, broken: str) -> Change:
    """The change between two texts: what lies between their common beginning and their common end."""
    limit = min(len(source), len(broken))
    head = 0
    while head < limit and source[head] == broken[head]:
        head += 1
    tail = 0
    while tail < limit - head and source[-1 - tail] == broken[-1 - tail]:
        tail += 1
    return Change(head, len(source) - tail, broken[head : len(broken) - tail])


def apply(source: str, changes: list[Change]) -> str:
    """The text with all changes, which must not overlap, made."""
    for change in sorted(changes, reverse=True):
        source = source[: change.begin] + change.text + source[change.end :]
    return source


def choose(rng: random.Random, candidates: list[Change], count: int, gap: int = 2) -> list[Change]:
    """Up to `count` candidates in random order that stand at least `gap` characters apart, returned in order of place."""
    pool = list(candidates)
    rng.shuffle(pool)
    chosen: list[Change] = []
    for change in pool:
        if all(change.end + gap <= other.begin or change.begin >= other.end + gap for other in chosen):
            chosen.append(change)
            if len(chosen) == count:
                break
    return sorted(chosen)
