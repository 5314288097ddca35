"""The `coordinator` section of the config: batches, staleness, workers, budget, probes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class CoordinatorConfig(BaseModel):
    """How one training run draws, admits and trains."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(200, ge=1, description="Training steps after which the run ends.")
    minutes: float = Field(0.0, ge=0, description="Wall-clock budget of the run in minutes; 0 is none.")
    groups_per_batch: int = Field(8, ge=1, description="Groups in one training step.")
    staleness: int = Field(2, ge=0, description="Bound S: a group's oldest token is at most S steps old when trained.")
    rollout_workers: int = Field(2, ge=1, description="Rollout worker processes.")
    rollouts_per_worker: int = Field(16, ge=1, description="Rollouts that one worker runs at once.")
    rollout_attempts: int = Field(
        3, ge=1, description="Fresh rollouts tried for one place of a group before it is void."
    )
    void_limit: int = Field(20, ge=1, description="Void groups in a row that stop the run with an error.")
    deterministic: bool = Field(
        False, description="One worker, one rollout at a time, S = 0, no clock in any decision: two runs end bit-equal."
    )
    permute_rewards: bool = Field(
        False, description="Control: permute total rewards within each group, all else equal (the learning check)."
    )
    seed: int = Field(0, ge=0, description="Seed of the run: prompt order and every rollout's seed follow from it.")
    split: str = Field("rl", description="Task split that prompts are drawn from.")
    probe_every: int = Field(0, ge=0, description="Steps between held-out probes; 0 is none.")
    probe_tasks: int = Field(8, ge=1, description="Held-out tasks of a probe.")
    probe_attempts: int = Field(4, ge=1, description="Attempts at each task of a probe.")
    keep_rollouts: int = Field(400, ge=0, description="Newest rollouts kept readable beside the ledger.")
    address: str = Field(
        "", description="Ray cluster to join, for example auto or ray://head:10001; empty starts one here."
    )
