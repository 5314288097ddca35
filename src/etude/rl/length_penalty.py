"""The concave length penalty of SPEC R8 (report section 4.2.3): how much an amount of effort costs.

Plain floats. Knows nothing of rewards, of groups or of what a token is: effort arrives as counts.
"""

from __future__ import annotations

import math
from typing import Protocol

from etude.records.errors import BadInput
from etude.records.rollout import Effort


class EffortWeights(Protocol):
    """Anything with one non-negative weight for each of the six efforts, such as `EffortWeightsConfig`."""

    @property
    def thinking_tokens(self) -> float: ...
    @property
    def tool_call_tokens(self) -> float: ...
    @property
    def tool_output_tokens(self) -> float: ...
    @property
    def final_tokens(self) -> float: ...
    @property
    def tool_calls(self) -> float: ...
    @property
    def turns(self) -> float: ...


def weighted_effort(effort: Effort, weights: EffortWeights) -> float:
    """x of SPEC R8: the weighted sum of the six counts."""
    return math.fsum(
        (
            weights.thinking_tokens * effort.thinking_tokens,
            weights.tool_call_tokens * effort.tool_call_tokens,
            weights.tool_output_tokens * effort.tool_output_tokens,
            weights.final_tokens * effort.final_tokens,
            weights.tool_calls * effort.tool_calls,
            weights.turns * effort.turns,
        )
    )


def length_penalty(x: float, k: float, q: float) -> float:
    """C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)), increasing and concave for x, k, q >= 0.

    Its limits are exact and approached without loss of digits: log(1 + k x) / k at q = 1, x at k = 0 (and at q = 0).
    Raises BadInput when an argument is negative or not finite.
    """
    for name, value in (("x", x), ("k", k), ("q", q)):
        if not (math.isfinite(value) and value >= 0):
            raise BadInput("length penalty", name, value, "a finite number >= 0")
    bend = k * x
    if math.isinf(bend):
        raise BadInput("length penalty", "k * x", bend, "a product that fits a float")
    # With L = log1p(k x):  C = x * (L / (k x)) * (expm1((1 - q) L) / ((1 - q) L)); both ratios tend to 1.
    log_term = math.log1p(bend)
    return x * _ratio(log_term, bend) * _ratio_expm1((1.0 - q) * log_term)


def relative_penalty(x: float, reference: float, k: float, q: float) -> float:
    """min(1, C(x) / C(reference)), in [0, 1]; `reference` > 0 is the effort that costs everything."""
    if not reference > 0:
        raise BadInput("length penalty", "reference", reference, "a number > 0")
    return min(1.0, length_penalty(x, k, q) / length_penalty(reference, k, q))


def _ratio(numerator: float, denominator: float) -> float:
    return 1.0 if denominator == 0.0 else numerator / denominator


def _ratio_expm1(z: float) -> float:
    return 1.0 if z == 0.0 else math.expm1(z) / z
