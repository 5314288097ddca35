"""The `weightsync` section of the config tree."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class WeightSyncConfig(BaseModel):
    """How weights travel from the trainer to the engines."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: str = Field("", description="Object store: a folder or a URL such as file:///path; empty = inside the run.")
    anchor_every: int = Field(25, ge=1, description="Every how many committed versions one is written whole.")
    part_bytes: int = Field(64 << 20, ge=1 << 10, description="Size in bytes after which a new part object is begun.")
    put_attempts: int = Field(3, ge=1, description="How often one upload is tried before the publish fails.")
