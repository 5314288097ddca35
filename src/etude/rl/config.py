"""The `rl` section of the config: what a rollout earns and how many make a group.

Knows nothing of the optimiser (that is `trainer.config`). Report sections 4.1 and 4.2.3; SPEC R1, R7, R8.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

KLHorizon = Literal["token", "sequence"]
"""How far ahead a token answers for the KL: `rl.kl.kl_advantage`."""


class EffortWeightsConfig(BaseModel):
    """Weight of each of the six efforts in x, the input of the length penalty (SPEC R8)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    thinking_tokens: float = Field(default=1.0, ge=0, description="weight of one thinking token")
    tool_call_tokens: float = Field(default=1.0, ge=0, description="weight of one token of a tool call")
    tool_output_tokens: float = Field(default=0.25, ge=0, description="weight of one token of a tool's result")
    final_tokens: float = Field(default=1.0, ge=0, description="weight of one token of the final message")
    tool_calls: float = Field(default=4.0, ge=0, description="weight of one tool call")
    turns: float = Field(default=4.0, ge=0, description="weight of one turn")


class LengthPenaltyConfig(BaseModel):
    """C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)), scaled by C(reference_effort) and capped at 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    k: float = Field(default=0.02, ge=0, description="how soon the curve bends; 0 is linear")
    q: float = Field(default=0.5, ge=0, description="how strongly it bends; 0 is linear, 1 is logarithmic")
    reference_effort: float = Field(
        default=400.0, gt=0, description="weighted effort at which the penalty reaches its cap"
    )
    weights: EffortWeightsConfig = EffortWeightsConfig()
    successes_only: bool = Field(default=False, description="penalise only rollouts that succeeded (DESIGN decision 4)")


class HabitConfig(BaseModel):
    """When to say that the policy gives up sooner where it always fails (DESIGN decision 4)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    window: int = Field(default=32, ge=1, description="groups of each kind in the baseline and in the recent mean")
    alarm_ratio: float = Field(
        default=0.7, gt=0, lt=1, description="alarm when the ratio of turns falls under this share"
    )


class RLConfig(BaseModel):
    """Groups and rewards."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    group_size: int = Field(default=8, ge=2, description="rollouts of a prompt, fixed (SPEC R1)")
    reward_weights: dict[str, float] = Field(
        default={"success": 1.0, "effort": -0.05}, description="weight of each reward component in the total"
    )
    length_penalty: LengthPenaltyConfig = LengthPenaltyConfig()
    curriculum: Literal["uniform", "signal"] = Field(
        default="uniform",
        description="order of prompts: uniform, or mutation operators in proportion to how often their groups were mixed",
    )
    habits: HabitConfig = HabitConfig()
