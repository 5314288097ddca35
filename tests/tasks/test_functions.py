"""Normal form, hashes and what counts as self-contained."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.tasks.functions import Function, digest, functions_of, normalise, parse_function
from etude.tasks.sources import SourceModule


def _only(text: str) -> Function:
    found = list(functions_of(SourceModule("m", "p 1", "MIT", text)))
    assert len(found) == 1
    return found[0]


def test_normal_form_has_no_docstring_annotation_or_decorator(functions: dict[str, Function]) -> None:
    source = functions["clamp"].source
    assert source.startswith("def clamp(value, low, high=9):\n    if value < low:")
    assert normalise(parse_function(source)) == source


@given(st.lists(st.sampled_from("abcdefgh"), min_size=3, max_size=3, unique=True), st.sampled_from(["f", "g", "other"]))
def test_digest_ignores_names_of_locals_and_of_the_function(names: list[str], function: str) -> None:
    x, y, z = names
    source = f"def {function}({x}, {y}):\n    {z} = {x} + {y}\n    return {z} * 2"
    assert digest(source) == digest("def base(p, q):\n    r = p + q\n    return r * 2")
    assert digest(source) != digest("def base(p, q):\n    r = p - q\n    return r * 2")


@pytest.mark.parametrize(
    ("body", "testable"),
    [
        ("import math\ndef f(x):\n    y = math.floor(x)\n    return y + 1 - 2", True),
        ("import os\ndef f(x):\n    y = os.path.join(x, 'a')\n    return y + 'some text'", True),
        ("import os\ndef f(x):\n    y = os.listdir(x)\n    return y + ['some text']", False),
        ("import os\ndef f(x):\n    y = os.path.exists(x)\n    return y + 1 - 1 + 2", False),
        ("import random\ndef f(x):\n    y = random.choice(x)\n    return y + 1", False),
        ("def f(x):\n    y = helper(x)\n    return y + 'some text here'", False),
        ("def f(self, x):\n    y = x + 1\n    return y + 1 + 2 + 3", False),
        ("def f(x):\n    y = x.__class__\n    return y + 1 + 2 + 3", False),
        ("def f(x):\n    y = open(x)\n    return y + 1 + 2 + 3 + 4", False),
        ("import datetime\ndef f(x):\n    y = datetime.date.today()\n    return y - x", False),
    ],
)
def test_self_contained_means_deterministic_and_without_access_to_the_machine(body: str, testable: bool) -> None:
    assert _only(body).testable is testable


def test_functions_out_of_bounds_are_left_out() -> None:
    long = "def f(x):\n" + "".join(f"    x = x + {n}\n" for n in range(20)) + "    return x"
    assert not list(functions_of(SourceModule("m", "p", "MIT", long)))
    assert not list(functions_of(SourceModule("m", "p", "MIT", "def f(x):\n    return x")))
    assert not list(functions_of(SourceModule("m", "p", "MIT", "def f(:\n")))


def test_source_of_a_row_parses_to_one_function(functions: dict[str, Function]) -> None:
    for function in functions.values():
        assert isinstance(ast.parse(function.source).body[0], ast.FunctionDef)
        assert function.hints == (("float", "int", "int") if function.name == "clamp" else ("",))
