"""The group advantage: reward minus the mean of its group (report section 4.1; SPEC R1, R2).

No division by the standard deviation, no length, no tokens: one number a rollout. KL terms are added at loss time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from etude.records.errors import BadInput


def group_advantages(rewards: Sequence[float], group_size: int) -> tuple[float, ...]:
    """`rewards[i] - mean(rewards)` for a whole group; exactly 0 everywhere when all rewards are equal.

    Raises BadInput when the group is not whole (DESIGN decision 4: whole or void) or a reward is not finite.
    """
    if group_size < 2:
        raise BadInput("advantage", "group_size", group_size, "at least 2 rollouts a group")
    if len(rewards) != group_size:
        raise BadInput("advantage", "rewards", len(rewards), f"exactly {group_size} rollouts: a group is whole or void")
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise BadInput("advantage", f"rewards[{index}]", reward, "a finite number")
    if min(rewards) == max(rewards):
        return (0.0,) * group_size
    mean = math.fsum(rewards) / group_size
    return tuple(reward - mean for reward in rewards)
