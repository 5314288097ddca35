"""C(x) of SPEC R8: its limits, its shape, and its six inputs."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.records.errors import BadInput
from etude.records.rollout import Effort
from etude.rl.config import EffortWeightsConfig, LengthPenaltyConfig
from etude.rl.length_penalty import length_penalty, relative_penalty, weighted_effort
from etude.rl.rewards import effort_component

efforts = st.floats(0.0, 1e6)
bends = st.floats(1e-6, 10.0)
curves = st.floats(0.0, 3.0)


@given(efforts, st.integers(0, 20), st.sampled_from([0, 2, 3, 4]))
def test_equals_the_formula_in_exact_arithmetic_for_whole_exponents(x: float, k_sixteenths: int, q: int) -> None:
    k = Fraction(k_sixteenths, 16)
    exact = Fraction(x) if k == 0 else ((1 + k * Fraction(x)) ** (1 - q) - 1) / (k * (1 - q))
    assert length_penalty(x, float(k), float(q)) == pytest.approx(float(exact), rel=1e-13)


@given(efforts, bends, st.floats(0.0, 3.0).filter(lambda q: abs(q - 1) > 0.01))
def test_equals_the_plain_formula_where_that_is_well_conditioned(x: float, k: float, q: float) -> None:
    plain = ((1 + k * x) ** (1 - q) - 1) / (k * (1 - q))
    # the subtraction of 1 and the sum 1 + k x lose up to 2^-53 absolutely
    assert length_penalty(x, k, q) == pytest.approx(plain, rel=1e-9, abs=1e-14 / (k * abs(1 - q)))


@given(efforts, bends)
def test_is_the_logarithm_at_q_one(x: float, k: float) -> None:
    assert length_penalty(x, k, 1.0) == pytest.approx(math.log1p(k * x) / k, rel=1e-14)


@given(efforts, bends, st.floats(-1e-4, 1e-4))
def test_tends_to_the_logarithm_as_q_tends_to_one(x: float, k: float, gap: float) -> None:
    log_term = math.log1p(k * x)
    z = gap * log_term
    series = log_term / k * (1 + z / 2 + z * z / 6 + z**3 / 24 + z**4 / 120)  # expm1(z) / z
    assert length_penalty(x, k, 1.0 - gap) == pytest.approx(series, rel=1e-12)


@given(efforts, curves)
def test_is_x_at_k_zero(x: float, q: float) -> None:
    assert length_penalty(x, 0.0, q) == x


@given(st.floats(0.0, 1e3), st.floats(0.0, 1e-9), curves)
def test_tends_to_x_as_k_tends_to_zero(x: float, k: float, q: float) -> None:
    u = k * x
    series = x * (1 - q * u / 2 + q * (q + 1) * u * u / 6)
    assert length_penalty(x, k, q) == pytest.approx(series, rel=1e-14, abs=0)


@given(efforts, st.floats(5e-324, 1e-300), curves)
def test_is_stable_for_subnormal_bends(x: float, k: float, q: float) -> None:
    assert length_penalty(x, k, q) == pytest.approx(x, rel=1e-12)


@given(efforts, efforts, bends, curves)
def test_never_decreases(a: float, b: float, k: float, q: float) -> None:
    low, high = sorted((a, b))
    assert length_penalty(low, k, q) <= length_penalty(high, k, q) * (1 + 1e-14)


@given(efforts, efforts, bends, curves)
def test_is_concave(a: float, b: float, k: float, q: float) -> None:
    middle = length_penalty((a + b) / 2, k, q)
    chord = (length_penalty(a, k, q) + length_penalty(b, k, q)) / 2
    assert middle >= chord * (1 - 1e-12)


@pytest.mark.parametrize("arguments", [(-1.0, 1.0, 1.0), (1.0, -1.0, 1.0), (1.0, 1.0, -0.1), (math.nan, 1.0, 1.0)])
def test_refuses_what_would_not_be_concave_and_increasing(arguments: tuple[float, float, float]) -> None:
    with pytest.raises(BadInput, match="length penalty"):
        length_penalty(*arguments)


@given(efforts, st.floats(1e-3, 1e6), bends, curves)
def test_relative_penalty_is_capped_at_the_reference(x: float, reference: float, k: float, q: float) -> None:
    value = relative_penalty(x, reference, k, q)
    assert 0.0 <= value <= 1.0
    if x >= reference * (1 + 1e-9):
        assert value == pytest.approx(1.0, rel=1e-12)


def test_each_of_the_six_efforts_counts_with_its_own_weight() -> None:
    names = list(EffortWeightsConfig.model_fields)
    weights = EffortWeightsConfig(**{name: float(10**place) for place, name in enumerate(names)})
    assert len(names) == 6
    for place, name in enumerate(names):
        assert weighted_effort(Effort(**{name: 3}), weights) == 3.0 * 10**place
    assert weighted_effort(Effort(**dict.fromkeys(names, 1)), weights) == 111111.0


def test_penalty_on_successes_only_leaves_failures_alone() -> None:
    effort = Effort(thinking_tokens=50, turns=3)
    config = LengthPenaltyConfig(successes_only=True)
    assert effort_component(effort, success=False, config=config) == 0.0
    assert effort_component(effort, success=True, config=config) > 0.0
    assert effort_component(effort, success=False, config=LengthPenaltyConfig()) > 0.0
