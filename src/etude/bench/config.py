"""The `evaluation` section of the config: which held-out tasks, how many attempts, at which temperature."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class EvaluationConfig(BaseModel):
    """One evaluation before and one after a run; the same tasks, attempts and seeds on both sides."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    split: str = Field("held_out", description="Split that evaluation tasks come from.")
    tasks: int = Field(32, ge=1, description="Tasks, at most `per_module` of one source module.")
    per_module: int = Field(4, ge=1, description="Most tasks of one source module.")
    attempts: int = Field(4, ge=1, description="Attempts at each task.")
    best_of: int = Field(4, ge=1, description="K of best-of-K.")
    temperature: float = Field(1.0, ge=0, description="Sampling temperature of evaluations.")
    seed: int = Field(1234, ge=0, description="Seed of the choice of tasks and of every attempt.")
