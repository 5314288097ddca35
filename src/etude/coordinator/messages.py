"""What the run loop, its rollout workers and its trainer say to each other: frozen records, the same in process and over Ray.

No torch, no Ray. Big arrays travel as raw bytes named by their sha256.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from etude.records.rollout import Rollout


class RolloutJob(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to run. `temperature` None keeps the agent config's."""

    task_id: str
    attempt: int
    seed: int
    temperature: float | None = None
    keep_blobs: bool = True
    """Send routes and masks back; evaluations have no use for them."""
    force_retry: bool = False
    """Baseline of the learning check: after a failing run the harness takes `finish` away while edits are left."""


class RolloutResult(msgspec.Struct, frozen=True, kw_only=True):
    """The finished rollout and the arrays that training needs, by digest."""

    rollout: Rollout
    blobs: dict[str, bytes] = {}


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """A committed version of the weights: where its manifest lies and the root digest the trainer recorded for it."""

    policy_version: int
    step: int
    manifest_key: str
    digest: str
    delta_bytes: int
    seconds: float


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One optimiser step as the trainer saw it; see `trainer.step.StepStats` for the figures."""

    step: int
    policy_version: int
    digest: str
    """Root digest of the weights that the step made, as they are published."""
    figures: dict[str, float]


class WorkerHandle(Protocol):
    """A rollout worker as the run loop sees it."""

    async def run(self, job: RolloutJob) -> RolloutResult:
        """Runs one rollout to its end; raises only when the worker itself is lost or an invariant broke."""
        ...


class TrainerHandle(Protocol):
    """The trainer as the run loop sees it."""

    async def publish_first(self) -> Published:
        """Publishes the starting weights as version 0 and waits for the commit."""
        ...

    async def step(self, groups: Sequence[bytes], blobs: dict[str, bytes], policy_version: int) -> StepReport:
        """Trains on encoded groups, starts publishing the result as `policy_version`, and returns without waiting for it."""
        ...

    async def published(self, policy_version: int) -> Published:
        """Waits until the version, or a later one that covers it, is committed."""
        ...

    async def save(self, folder: str) -> None:
        """Writes the policy as a Hugging Face folder."""
        ...
