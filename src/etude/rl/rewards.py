"""How reward components become one number, and how a rollout's effort enters it (SPEC R7, R8).

Components are named floats; their weights are config. Knows nothing of verifiers or tools, which make the components.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from etude.records.errors import BadInput
from etude.records.rollout import Effort
from etude.rl.config import LengthPenaltyConfig
from etude.rl.length_penalty import relative_penalty, weighted_effort

TOTAL = "total"
"""Key of the combined reward in `Rollout.rewards`."""


def effort_component(effort: Effort, success: bool, config: LengthPenaltyConfig) -> float:
    """The component `effort` in [0, 1]: min(1, C(x) / C(x_ref)); 0 for a failure when only successes are penalised."""
    if config.successes_only and not success:
        return 0.0
    return relative_penalty(weighted_effort(effort, config.weights), config.reference_effort, config.k, config.q)


def combine_rewards(components: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """The components plus `total`, the weighted sum.

    Every component needs a weight (0 keeps it as a mere record): a component that silently counts for nothing is a
    config typo. Raises BadInput for one without a weight, named `total`, or not finite.
    """
    for name, value in components.items():
        if name == TOTAL:
            raise BadInput("rewards", name, value, "another name: `total` is the weighted sum")
        if name not in weights:
            raise BadInput("rewards", f"reward_weights.{name}", None, "a weight for every reward component")
        if not math.isfinite(value):
            raise BadInput("rewards", name, value, "a finite number")
    total = math.fsum(weights[name] * value for name, value in sorted(components.items()))
    return {**components, TOTAL: total}
