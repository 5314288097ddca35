"""Small rows and tasks that every test of this room may use."""

from __future__ import annotations

import pytest
from hypothesis import settings

from etude.records.task import Split, Task
from etude.tasks.corpus import Row, _tried_row
from etude.tasks.functions import Function, functions_of
from etude.tasks.inputs import try_function
from etude.tasks.make import repair_task
from etude.tasks.sources import SourceModule

settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")

CLAMP = '''
import math

def clamp(value: float, low: int, high: int = 9) -> float:
    """Keeps value inside."""
    if value < low:
        return low
    if value > high:
        return high
    return value

def total(items):
    result = 0
    for item in items:
        if item > 2:
            result += item * 2
    return result
'''


@pytest.fixture(scope="session")
def functions() -> dict[str, Function]:
    return {f.name: f for f in functions_of(SourceModule("pkg.numbers_m", "pkg 1.0", "MIT", CLAMP))}


@pytest.fixture(scope="session")
def row(functions: dict[str, Function]) -> Row:
    trial = try_function(functions["clamp"])
    assert trial is not None
    return _tried_row(functions["clamp"], trial, Split.RL)


@pytest.fixture(scope="session")
def task(row: Row) -> Task:
    return repair_task(row, 0)
