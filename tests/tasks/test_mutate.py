"""Each operator makes one mistake on one line, and the mistake can be taken back."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.tasks.mutate import DEFAULT_MIX, OPERATORS, Mutant, mutants

SAMPLES = {
    "comparison": "def f(a, b):\n    if a == b:\n        return 1\n    return 2",
    "boundary": "def f(a, b):\n    if a < b:\n        return 1\n    return 2",
    "arithmetic": "def f(a, b):\n    a += b\n    return a * b",
    "boolean": "def f(a, b):\n    c = a and b\n    return c",
    "negation": "def f(a, b):\n    if not a:\n        return b\n    return a",
    "constant": "def f(a, b):\n    c = a[3]\n    return c",
    "truth": "def f(a, b):\n    c = True\n    return c",
    "sign": "def f(a, b):\n    c = a[-1]\n    return -b",
    "slice": "def f(a, b):\n    c = a[1:]\n    return c + a[:b]",
    "missing_return": "def f(a, b):\n    c = a\n    return c",
    "swapped_arguments": "def f(a, b):\n    c = g(a, b)\n    return c",
    "swapped_operands": "def f(a, b):\n    c = a - b\n    return c",
    "twin_call": "def f(a, b):\n    c = min(a, b)\n    return c.lstrip()",
    "loop_exit": "def f(a, b):\n    for c in a:\n        if c:\n            break\n    return b",
    "wrong_name": "def f(a, b):\n    c = a\n    return c",
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_changes_exactly_one_line_and_is_reversible(operator: str) -> None:
    source = SAMPLES[operator]
    found = mutants(source, (operator,))
    assert found
    for mutant in found:
        broken = mutant.apply(source)
        different = [n for n, (a, b) in enumerate(zip(source.split("\n"), broken.split("\n"))) if a != b]
        assert different == [mutant.line] and mutant.line > 0
        assert mutant.operator == operator
        assert mutant.revert(broken) == source
        assert ast.unparse(ast.parse(broken)) == broken


def test_wrong_name_is_in_no_default_mix() -> None:
    assert "wrong_name" in OPERATORS and "wrong_name" not in DEFAULT_MIX
    assert {m.operator for source in SAMPLES.values() for m in mutants(source)} == set(DEFAULT_MIX)


@given(st.sampled_from(sorted(SAMPLES.values())), st.integers(0, 5), st.text(max_size=3))
def test_mutants_are_distinct_bounded_and_depend_only_on_source_and_seed(source: str, limit: int, seed: str) -> None:
    found = mutants(source, limit=limit, seed=seed)
    assert found == mutants(source, limit=limit, seed=seed)
    assert len(found) <= limit and len({m.apply(source) for m in found}) == len(found)
    assert source not in {m.apply(source) for m in found}


def test_a_mutant_refuses_a_text_that_it_was_not_made_for() -> None:
    with pytest.raises(ValueError):
        Mutant("truth", 1, "    return True", "    return False").apply("def f(a):\n    return 1")
