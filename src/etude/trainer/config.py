"""The `trainer` section of the config: optimiser, loss constants, KL, importance weights, micro-batches.

What a rollout earns is the `rl` section; what a batch is made of is the coordinator's.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from etude.rl.config import KLHorizon


class TrainerConfig(BaseModel):
    """One policy trainer. The loss denominator is groups x group_size x reference_length (DESIGN decision 3)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    learning_rate: float = Field(default=1e-4, gt=0, description="Adam's step size")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of Adam's first moment")
    beta2: float = Field(default=0.99, ge=0, lt=1, description="decay of Adam's second moment")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="added to Adam's denominator")
    max_grad_norm: float = Field(default=1.0, gt=0, description="global L2 norm that gradients are clipped to")
    groups: int = Field(
        default=8, ge=1, description="groups of a step, over all ranks: first factor of the denominator"
    )
    group_size: int = Field(default=8, ge=1, description="rollouts of a group: second factor of the denominator")
    reference_length: float = Field(
        default=64.0, gt=0, description="reference length in sampled tokens: third factor of the denominator"
    )
    kl_beta: float = Field(default=0.001, ge=0, description="weight of the KL to the reference; 0 leaves it out")
    measure_kl: bool = Field(default=True, description="evaluate the reference for the KL statistic at kl_beta = 0 too")
    kl_horizon: KLHorizon = Field(default="token", description="token or sequence (DESIGN decision 2)")
    importance_cap: float = Field(default=2.0, gt=0, description="C of the weight min(pi / mu, C)")
    plausibility_alpha: float = Field(
        default=0.5, ge=0, le=1, description="a replayed expert stays if its score >= alpha x the smallest of the top-k"
    )
    replay_routes: bool = Field(default=True, description="replay the experts that the sampler chose")
    micro_batch_tokens: int = Field(
        default=4096,
        ge=1,
        description="token slots, padding included, of one forward and backward; one row may exceed it",
    )
    layout: Literal["padded", "packed"] = Field(
        default="padded", description="rows hold one document each (fast on CPU), or several up to micro_batch_tokens"
    )
    freeze_router_bias: bool = Field(default=True, description="leave the router's selection biases as they are")
    threads: int = Field(
        default=1,
        ge=0,
        description="threads of the process that trains, more only on idle cores; 0 leaves torch's setting",
    )

    @property
    def denominator(self) -> float:
        """The constant that the loss is divided by."""
        return self.groups * self.group_size * self.reference_length
