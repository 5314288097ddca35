"""The `environments` section of the config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from etude.environments.pod import PodBackend, PodSpec


class EnvironmentsConfig(BaseModel):
    """Pods: how they are made and what each may use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: str = Field(
        "namespace", pattern="^namespace$", description="Which kind of pod; `namespace` is the one that exists."
    )
    cache: Path = Field(Path(".cache/pods"), description="Folder for the image and the compiled launcher.")
    max_pods: int = Field(
        default_factory=lambda: 8 * (os.cpu_count() or 1),
        ge=1,
        description="Pods at a time on this machine; further starts wait.",
    )
    start_timeout_s: float = Field(10.0, gt=0, description="Seconds until a starting pod counts as failed.")
    queue_timeout_s: float = Field(600.0, gt=0, description="Seconds that a start may wait for a place.")
    cpus: float = Field(1.0, gt=0, description="Cores that one pod may use, where the machine can limit it.")
    disk_bytes: int = Field(64 << 20, ge=1 << 20, description="Bytes that files in one pod may take.")
    launcher: str = Field(
        "auto", pattern="^(auto|c|python)$", description="`c` is compiled on first use, `python` needs no compiler."
    )

    def spec(
        self,
        files: Mapping[str, bytes],
        *,
        memory_bytes: int = PodSpec.memory_bytes,
        processes: int = PodSpec.processes,
    ) -> PodSpec:
        """The specification of a pod under this config."""
        return PodSpec(
            files=files, memory_bytes=memory_bytes, processes=processes, cpus=self.cpus, disk_bytes=self.disk_bytes
        )

    async def open(self) -> PodBackend:
        """The configured backend. Raises MissingCapability, whose text says what to enable."""
        from etude.environments.backends.namespace import NamespaceBackend

        return await NamespaceBackend.open(
            self.cache,
            max_pods=self.max_pods,
            start_timeout_s=self.start_timeout_s,
            queue_timeout_s=self.queue_timeout_s,
            launcher=self.launcher,
            cpus=self.cpus,
            disk_bytes=self.disk_bytes,
        )
