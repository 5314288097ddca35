"""The `[tasks]` section of the config tree."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TasksConfig(BaseModel):
    """Where tasks and corpora lie and how many processes make or check them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    archive: str = Field("data/tasks.tar.zst", description="Task set: a .tar.zst archive or a folder of task folders.")
    corpus: str = Field(".cache/corpus", description="Folder of the function corpora that `etude tasks make` writes.")
    sources: str = Field(".cache/sources", description="Folder of the downloaded, verified source distributions.")
    processes: int = Field(2, ge=1, description="Child processes that make or check tasks.")
