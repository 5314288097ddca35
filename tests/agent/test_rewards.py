"""Reward components and their total."""

import msgspec
import pytest

from etude.agent.rewards import reward
from etude.records.errors import BadInput
from etude.records.rollout import Effort, Rollout, StopReason, Verdict
from etude.rl.config import RLConfig
from etude.rl.length_penalty import relative_penalty, weighted_effort


def rollout(success=True, effort=None):
    return Rollout(
        id="r",
        task_id="t",
        attempt=0,
        seed=0,
        generations=(),
        tool_calls=(),
        stop_reason=StopReason.FINISH,
        verdict=Verdict(success=success, passed=1, total=1),
        effort=effort or Effort(tool_call_tokens=20, tool_calls=3, turns=3),
    )


@pytest.mark.parametrize("success", [True, False])
def test_the_default_is_success_minus_a_twentieth_of_the_relative_effort(make_task, success):
    config = RLConfig()
    made = reward(rollout(success), make_task(), config)
    penalty = config.length_penalty
    share = relative_penalty(
        weighted_effort(rollout().effort, penalty.weights), penalty.reference_effort, penalty.k, penalty.q
    )
    assert made["total"] == pytest.approx(float(success) - 0.05 * share) and 0 < share < 1


def test_a_behaviour_counts_with_its_weight_and_needs_one(make_task):
    class Polite:
        name = "polite"

        def score(self, rollout, task):
            return -1.0

    weights = {"success": 1.0, "effort": 0.0, "polite": 0.25}
    made = reward(rollout(), make_task(), RLConfig(reward_weights=weights), [Polite()])
    assert made["polite"] == -1.0 and made["total"] == pytest.approx(0.75)
    with pytest.raises(BadInput, match="polite"):
        reward(rollout(), make_task(), RLConfig(), [Polite()])


def test_what_was_not_verified_has_no_reward(make_task):
    with pytest.raises(BadInput, match="verdict"):
        reward(msgspec.structs.replace(rollout(), verdict=None), make_task(), RLConfig())
