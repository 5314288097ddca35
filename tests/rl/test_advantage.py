"""The group advantage."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.records.errors import BadInput
from etude.rl.advantage import group_advantages

rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


@given(rewards)
def test_sums_to_zero(values: list[float]) -> None:
    advantages = group_advantages(values, len(values))
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-13)


@given(rewards, st.floats(0.125, 8))
def test_scales_with_the_rewards_so_there_is_no_division_by_the_deviation(values: list[float], scale: float) -> None:
    once = group_advantages(values, len(values))
    scaled = group_advantages([scale * v for v in values], len(values))
    assert scaled == pytest.approx([scale * a for a in once], abs=1e-12)


@given(st.floats(-1e3, 1e3), st.integers(2, 17))
def test_is_exactly_zero_when_all_rewards_are_equal(value: float, size: int) -> None:
    assert group_advantages([value] * size, size) == (0.0,) * size


@pytest.mark.parametrize("count", [0, 7, 9])
def test_a_group_that_is_not_whole_is_refused(count: int) -> None:
    with pytest.raises(BadInput, match="exactly 8 rollouts"):
        group_advantages([1.0] * count, 8)


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(BadInput, match=r"rewards\[1\]"):
        group_advantages([0.0, math.nan], 2)
