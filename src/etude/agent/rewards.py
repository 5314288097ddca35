"""The reward components of a rollout: verifier success, effort, and behaviours by hook (SPEC R7, R8).

Makes the components; `rl.rewards` knows how effort is penalised and how components become the total.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from etude.records.errors import BadInput
from etude.records.rollout import Rollout
from etude.records.task import Task
from etude.rl.config import RLConfig
from etude.rl.rewards import combine_rewards, effort_component

SUCCESS, EFFORT = "success", "effort"


class BehaviourReward(Protocol):
    """A behaviour to encourage or penalise. `name` needs a weight in `rl.reward_weights`."""

    @property
    def name(self) -> str:
        """The component's key."""
        ...

    def score(self, rollout: Rollout, task: Task) -> float:
        """A finite number, usually within [-1, 1]; depends on the records only."""
        ...


def reward(
    rollout: Rollout, task: Task, config: RLConfig, behaviours: Sequence[BehaviourReward] = ()
) -> dict[str, float]:
    """Components and `total` of a verified rollout: by default success - 0.05 * min(1, C(x) / C(x_ref)).

    Raises BadInput when the rollout has no verdict or a behaviour no weight.
    """
    if rollout.verdict is None:
        raise BadInput("rollout", "verdict", None, "a verdict: what was not verified has no reward")
    success = rollout.verdict.success
    components = {
        SUCCESS: float(success),
        EFFORT: effort_component(rollout.effort, success, config.length_penalty),
    }
    for behaviour in behaviours:
        if behaviour.name in components:
            raise BadInput("rewards", "behaviour", behaviour.name, "a name of its own")
        components[behaviour.name] = behaviour.score(rollout, task)
    return combine_rewards(components, config.reward_weights)
