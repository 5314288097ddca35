"""What the ledger records: one small record per fact of a run (DESIGN decision 5). Pure nouns, versioned by the ledger.

A draw is one group's life, numbered from 0 in the order drawn. `step` n is the n-th update; step 0 is the start.
"""

from __future__ import annotations

import msgspec

from etude.coordinator.slots import SlotState
from etude.records.rollout import CauseClass


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What the checks of every record depend on: staleness S, groups a batch, rollouts a group."""

    staleness: int
    batch_groups: int
    group_size: int
    tries: int = 3
    """Fresh rollouts of one place of a group."""


class EpochStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A coordinator took the run over; its first act. Steps after `resumed_step` are no longer of the lineage: their
    groups are queued again, a formed batch is given back. An incarnation begins at every restart from a checkpoint."""

    epoch: int
    incarnation: int
    resumed_step: int
    rules: Rules


class PromptDrawn(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A group goes in flight. Its tokens will be of `serving_step` or later: the smallest step that an engine serves."""

    draw: int
    task_id: str
    serving_step: int


class SlotMoved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One rollout of a group in flight changed its state."""

    draw: int
    place: int
    state: SlotState
    detail: str = ""


class GroupSealed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All rollouts of the group are scored; `digest` is that of its stored record, `oldest_version` over all its tokens."""

    draw: int
    rollouts: tuple[str, ...]
    oldest_version: int
    digest: str


class GroupQueued(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The sealed group may enter a batch."""

    draw: int


class GroupVoided(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The group is given up and its prompt returned: it may be drawn again."""

    draw: int
    reason: str
    cause: CauseClass = CauseClass.INFRASTRUCTURE


class BatchFormed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """These draws go to the trainer for that step."""

    step: int
    draws: tuple[int, ...]


class BatchReturned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The step was not made (a trainer was lost): its groups are queued again."""

    step: int
    reason: str


class StepCommitted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The step is done: its draws are trained, its weights are `policy_version` and have that root digest."""

    step: int
    draws: tuple[int, ...]
    policy_version: int
    digest: str


class VersionPublished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The version's manifest is committed. The run's first version, and one republished after a restart, has no step's
    record before it; every other must have the digest that its step recorded."""

    policy_version: int
    step: int
    digest: str
    manifest_key: str


class VersionApplied(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine serves that version; `digest` is the root digest of the tensors that its forward reads."""

    engine: str
    policy_version: int
    digest: str


class EngineLeft(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine is lost, drained or leased away: no group will be sampled by it."""

    engine: str
    reason: str


class LeaseTaken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Someone (an evaluation) holds a thing (an engine, a version) until released."""

    lease: str
    holder: str
    subject: str


class LeaseReleased(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The lease is over."""

    lease: str


class RunEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The coordinator stopped on purpose. A later epoch may go on."""

    reason: str


Record = (
    EpochStarted
    | PromptDrawn
    | SlotMoved
    | GroupSealed
    | GroupQueued
    | GroupVoided
    | BatchFormed
    | BatchReturned
    | StepCommitted
    | VersionPublished
    | VersionApplied
    | EngineLeft
    | LeaseTaken
    | LeaseReleased
    | RunEnded
)
