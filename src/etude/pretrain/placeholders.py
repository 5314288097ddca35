"""Stand-in failing checks for functions that cannot be run: they teach the form of a repair request, not its meaning.

Most corpus functions are not self-contained, so no check of them is known, while every task that the agent meets names
one. Without stand-ins the prompt's form would first be met in fine-tuning. The values are drawn, never computed.
"""

from __future__ import annotations

import random

VALUES: tuple[tuple[str, ...], ...] = (
    ("0", "1", "2", "3", "5", "7", "10", "12", "16", "100", "-1", "-4", "255"),
    ("0.5", "1.5", "3.0", "-2.25", "10.0", "0.0"),
    ("''", "'a'", "'abc'", "'Hello World'", "'foo_bar'", "'a,b'", "'x=1'", "'a/b.txt'", "'12'", "' x '", "'a.b.c'"),
    ("[]", "[1]", "[3, 1, 2]", "[5, 5, 0, -1]", "['a', 'b']", "['foo', 'bar', 'foo']", "[0, 2]"),
    ("True", "False", "None"),
    ("(1, 2)", "(0, 0)", "(3, 2, 1)", "('a', 1)", "()"),
    ("{}", "{'a': 1}", "{'b': 2, 'a': 1}", "{'x': 'y'}"),
    ("b''", "b'abc'", "b'12'"),
)
"""Literals by kind, like those that the task maker tries."""


def placeholder_check(rng: random.Random, parameters: int) -> tuple[str, str, str]:
    """(arguments, got, want) as source text: arguments of any kinds, two different results of one kind."""
    arguments = ", ".join(rng.choice(rng.choice(VALUES)) for _ in range(max(1, parameters)))
    got, want = rng.sample(rng.choice(VALUES), 2)
    return arguments, got, want
