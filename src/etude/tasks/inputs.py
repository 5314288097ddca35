"""Finds inputs for a function by trial, and which mutants they tell apart from it: the original is the oracle.

Each parameter gets a kind of value (guessed from its name and hint, or at random); kinds that give varied, short, repeatable
results are kept and drawn from. Runs inside `worker` children only. Deliberately knows nothing of splits or folders.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from etude.tasks.canonical import outcome
from etude.tasks.functions import Function, parse_function
from etude.tasks.mutate import Mutant, mutants

CALL_CPU_S = 0.1
MAX_TEXT = 60
"""Longest argument text, expected and shown value, in characters."""
MIN_CASES, MAX_CASES, MIN_DISTINCT = 10, 32, 3
MIN_FAILING = 3
"""A usable mutant fails so many cases: one to show, two to hide."""
_MAX_MUTANTS = 40

POOL: dict[str, list[object]] = {
    "int": [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 25, 100, -1, -2, -4],
    "small": [0, 1, 2, 3, 4, 5],
    "float": [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 0.25, 0.1, 10.0, 4.0, 100.0, 0.0, -1.5, -2.0],
    "positive": [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 0.25, 10.0, 4.0, 100.0, 1000.0, 300.0],
    "str": ["", "a", "abc", "Hello World", "foo_bar", "12", "a,b", " x ", "A-b", "x=1", "aXb", "-3", "a.b.c", "true", "b", "ab"],
    "path": ["a/b.txt", "/usr/lib", "x.py", "a/b/c", "", "dir/", "b.tar.gz", ".hidden", "/"],
    "chars": ["a", "B", "1", " ", "-", "z", "_", "é"],
    "lines": ["a\nb", "x", "one\n\ntwo\n", "  a\n    b\n", ""],
    "ints": [[], [1], [3, 1, 2], [5, 5, 0, -1], [1, 2, 3, 4, 5, 6], [2, 0], [0, 0], [7, 8, 9, 1]],
    "floats": [[0.5, 1.5], [1.0, 2.0, 3.0], [2.5], [3.0, -1.0, 0.0, 4.0], [10.0, 10.0]],
    "strs": [[], ["a"], ["b", "a", "c"], ["foo", "bar", "foo"], ["x y", ""], ["a=1", "b"], ["A", "a"]],
    "bool": [True, False],
    "none": [None],
    "dict": [{}, {"a": 1}, {"b": 2, "a": 1, "c": 3}, {"x": "y"}, {"a": None, "b": 0}, {"name": "n", "type": "t"}],
    "nested": [{"a": {"b": 1}}, {"a": [1, 2]}, {}, {"b": {}, "a": {"c": {"d": 2}}}],
    "pair": [(1, 2), (3, 4), (0, 0), (2, 1), (5, 2), (1, 1)],
    "triple": [(1, 2, 3), (3, 2, 1), (0, 5, 2), (1, 1, 1), (0, 0, 1)],
    "bytes": [b"", b"abc", b"\x00\x01\xff", b"a b", b"12"],
    "pairs": [[(1, 2), (3, 4)], [("a", 1)], [], [(0, 1), (1, 2), (2, 0)], [("a", 1), ("b", 2), ("a", 3)]],
    "matrix": [[[1, 2], [3, 4]], [[0, 1], [1, 0]], [[2]], [[1, 2, 3], [4, 5, 6]], [[1, 0, 0], [0, 1, 0], [0, 0, 1]]],
    "set": [{1, 2}, {3}, {2, 3}, set()],
}  # fmt: skip
_WEIGHT = {"int": 6, "str": 6, "ints": 4, "strs": 3, "float": 3, "positive": 2, "dict": 2, "bool": 2, "pair": 2}
_KINDS = list(POOL)
_WEIGHTS = [_WEIGHT.get(kind, 1) for kind in _KINDS]
_BY_NAME: list[tuple[str, tuple[str, ...]]] = [
    ("text string str s name key word label title prefix suffix sep value line msg token pattern", ("str", "chars")),
    ("path filename file dir url folder fname root", ("path", "str")),
    (
        "n i j k m count num size length index idx start stop step width height year month day lo hi limit depth",
        ("int", "small"),
    ),
    ("x y z a b c t r d p q v w alpha beta angle T P rho mu V", ("float", "int", "positive")),
    ("items seq lst list values xs arr array data l iterable elements args", ("ints", "strs", "floats")),
    ("names words strings keys lines tokens", ("strs",)),
    ("d dct dict mapping params options config kwargs obj", ("dict", "nested")),
    ("flag verbose strict reverse", ("bool",)),
    ("point vec vector shape pos coord size p1 p2 v1 v2 u", ("pair", "triple")),
    ("matrix mat grid board", ("matrix",)),
    ("ch char c", ("chars",)),
    ("code source docstring doc", ("lines", "str")),
    ("buf bytes b raw data", ("bytes",)),
]
_BY_HINT = {
    "int": ("int", "small"), "float": ("float", "positive"), "str": ("str", "path"), "bool": ("bool",), "bytes": ("bytes",),
    "dict": ("dict", "nested"), "list": ("ints", "strs"), "sequence": ("ints", "strs"), "iterable": ("ints", "strs"),
    "tuple": ("pair", "triple"), "mapping": ("dict",), "set": ("set",),
}  # fmt: skip


class Case(msgspec.Struct, frozen=True, array_like=True):
    """Argument text (what stands between the call's brackets) and the canonical text of the result."""

    args: str
    want: str


class TriedMutant(msgspec.Struct, frozen=True):
    """A mutant and what it gives on the cases that it fails: (index of the case, canonical text)."""

    mutant: Mutant
    failing: tuple[tuple[int, str], ...]


class Trial(msgspec.Struct, frozen=True):
    """What trial found out about one function."""

    cases: tuple[Case, ...]
    mutants: tuple[TriedMutant, ...]


def load(imports: tuple[str, ...], source: str, name: str) -> Callable[..., Any]:
    """Defines the function in a fresh namespace."""
    namespace: dict[str, Any] = {"__name__": "candidate"}
    exec("\n".join([*imports, source]), namespace)
    function: Callable[..., Any] = namespace[name]
    return function


def expression(values: tuple[object, ...]) -> str:
    """The text between the brackets of a call with these arguments."""
    return ", ".join(repr(value) for value in values)


def try_function(function: Function) -> Trial | None:
    """Cases and the mutants that fail at least MIN_FAILING of them; None when no inputs are found. Depends only on the
    function: the random choices are seeded by its digest."""
    rng = random.Random(function.digest)
    original = load(function.imports, function.source, function.name)
    cases = _find_cases(function, original, rng)
    if cases is None:
        return None
    tried = []
    for mutant in mutants(function.source, limit=_MAX_MUTANTS):
        try:
            broken = load(function.imports, mutant.apply(function.source), function.name)
        except Exception:
            continue
        failing = _failing(broken, cases)
        if len(failing) >= MIN_FAILING:
            tried.append(TriedMutant(mutant, failing))
    return Trial(cases, tuple(tried)) if tried else None


def outcomes(job: tuple[tuple[str, ...], str, str, tuple[str, ...]]) -> list[str]:
    """Canonical outcomes of (imports, source, name, argument texts): what a second process repeats."""
    imports, source, name, expressions = job
    function = load(imports, source, name)
    return [outcome(function, text, CALL_CPU_S) for text in expressions]


def _failing(broken: Callable[..., Any], cases: tuple[Case, ...]) -> tuple[tuple[int, str], ...]:
    failing = []
    for index, case in enumerate(cases):
        got = outcome(broken, case.args, CALL_CPU_S)
        if got == "timeout" or " at 0x" in got:
            return ()
        if got != case.want:
            failing.append((index, got if len(got) <= 200 else got[:197] + "..."))
    shown = any(len(got) <= MAX_TEXT for _, got in failing)
    return tuple(failing) if shown else ()


def _good(text: str) -> bool:
    return len(text) <= MAX_TEXT and not text.startswith(("raises ", "timeout")) and " at 0x" not in text


def _find_cases(function: Function, original: Callable[..., Any], rng: random.Random) -> tuple[Case, ...] | None:
    shapes = _shapes(function, rng)
    ranked: list[tuple[int, float, tuple[str, ...]]] = []
    for kinds in shapes:
        found = {outcome(original, _draw(kinds, rng), CALL_CPU_S) for _ in range(5)}
        good = [text for text in found if _good(text)]
        if len(good) >= 2:
            ranked.append((len(good), rng.random(), kinds))
    if not ranked:
        return None
    ranked.sort(reverse=True)
    cases: dict[str, str] = {}
    for _, _, kinds in ranked[:5]:
        for _ in range(32):
            text = _draw(kinds, rng)
            if text in cases or len(text) > MAX_TEXT or not text.isascii():
                continue
            got = outcome(original, text, CALL_CPU_S)
            if _good(got) and got == outcome(original, text, CALL_CPU_S):
                cases[text] = got
    if len(cases) < MIN_CASES or len(set(cases.values())) < MIN_DISTINCT:
        return None
    return _varied(cases, rng)


def _varied(cases: dict[str, str], rng: random.Random) -> tuple[Case, ...]:
    by_result: dict[str, list[str]] = {}
    for text, want in cases.items():
        by_result.setdefault(want, []).append(text)
    chosen: list[Case] = []
    while by_result and len(chosen) < MAX_CASES:
        for want in list(by_result):
            chosen.append(Case(by_result[want].pop(0), want))
            if not by_result[want]:
                del by_result[want]
    chosen = chosen[:MAX_CASES]
    rng.shuffle(chosen)
    return tuple(chosen)


def _draw(kinds: tuple[str, ...], rng: random.Random) -> str:
    return expression(tuple(rng.choice(POOL[kind]) for kind in kinds))


def _shapes(function: Function, rng: random.Random) -> list[tuple[str, ...]]:
    arguments = parse_function(function.source).args
    names = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    if any(default is None for default in arguments.kw_defaults) or len(names) > 6:
        return []
    fewest, most = len(names) - len(arguments.defaults), len(names)
    if arguments.vararg is not None and most <= 1:
        most += 2
    if most == 0:
        return []
    hints = (*function.hints, *[""] * most)
    guesses = [_guess(name, hints[index]) for index, name in enumerate(names)]
    guesses += [tuple(_KINDS)] * (most - len(names))
    shapes = [
        (kind,) * most
        for kind in (_KINDS if most == 1 else ("int", "str", "ints", "float", "positive", "pair", "strs"))
    ]
    for _ in range(30):
        count = rng.randint(max(1, fewest), most)
        shapes.append(tuple(rng.choice(guess) for guess in guesses[:count]))
    for _ in range(50):
        count = rng.randint(max(1, fewest), most)
        shapes.append(tuple(rng.choices(_KINDS, _WEIGHTS, k=count)))
    return list(dict.fromkeys(shapes))


def _guess(name: str, hint: str) -> tuple[str, ...]:
    low = hint.lower()
    for word, kinds in _BY_HINT.items():
        if low.startswith(word):
            return kinds
    found: list[str] = []
    for words, kinds in _BY_NAME:
        if name in words.split() or name.lower() in words.split():
            found.extend(kinds)
    return tuple(found) or tuple(_KINDS)
