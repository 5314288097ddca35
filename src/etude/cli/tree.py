"""The whole config tree: each room's section under one root. Composes; computes nothing."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from etude.agent.config import AgentConfig
from etude.bench.config import EvaluationConfig
from etude.coordinator.config import CoordinatorConfig
from etude.environments.config import EnvironmentsConfig
from etude.inference.config import InferenceConfig
from etude.rl.config import RLConfig
from etude.trainer.config import TrainerConfig
from etude.weightsync.config import WeightSyncConfig

HOME = Path(__file__).resolve().parents[3]
"""The checkout: where `configs/` and `data/` lie."""


class Config(BaseModel):
    """Everything a run depends on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field("data/starter", description="Hugging Face folder of the policy to start from.")
    tasks: str = Field("data/tasks.tar.zst", description="Task set: a folder of Harbor tasks or one archive.")
    runs: str = Field("runs", description="Folder that runs are written to.")
    coordinator: CoordinatorConfig = CoordinatorConfig()
    rl: RLConfig = RLConfig()
    trainer: TrainerConfig = TrainerConfig()
    agent: AgentConfig = AgentConfig()
    inference: InferenceConfig = InferenceConfig()
    environments: EnvironmentsConfig = EnvironmentsConfig()
    weightsync: WeightSyncConfig = WeightSyncConfig()
    evaluation: EvaluationConfig = EvaluationConfig()


def located(path: str) -> Path:
    """A path as given, or inside the checkout when it does not exist from here."""
    here = Path(path)
    return here if here.is_absolute() or here.exists() else HOME / path
