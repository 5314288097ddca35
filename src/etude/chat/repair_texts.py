"""The texts of a repair task that a policy reads: the instruction line and the line a failing check prints.

One place for the task maker, the pretraining corpus and the scripted solver, so that what the starter was trained on is what it
meets, token for token. Knows nothing of how a failure was found.
"""

from __future__ import annotations

LONGEST_VALUE = 60
"""Characters of one shown value; longer ones are cut and end in `...`."""


def shown(value: str) -> str:
    """A value's text on one line, at most `LONGEST_VALUE` characters."""
    line = " ".join(value.split("\n"))
    return line if len(line) <= LONGEST_VALUE else line[: LONGEST_VALUE - 3] + "..."


def repair_instruction(function: str, path: str, failure: tuple[str, str, str] | None = None) -> str:
    """What the user asks. `failure` is (arguments, got, expected) as source text, `arguments` without parentheses."""
    request = f"fix {function} in {path}"
    if failure is None:
        return request
    arguments, got, expected = failure
    return f"{request}: {function}({shown(arguments)}) returned {shown(got)}, expected {shown(expected)}"


def failure_line(function: str, arguments: str, got: str, expected: str) -> str:
    """What the visible checks print for their first failure."""
    return f"{function}({shown(arguments)}) -> {shown(got)}, want {shown(expected)}"
