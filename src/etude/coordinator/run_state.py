"""The state of a run as the ledger's records make it, checked at every one of them (DESIGN decisions 4 to 6).

`RunState.apply` is the only way to change it and is pure: live and replayed states are equal. A record that breaks an
invariant raises IntegrityError with the numbers and the run stops:
draws = in flight + queued + trained + void; a prompt has at most one trained draw; both staleness rules; the digest of the
tensors that an engine reads is the one that the trainer recorded for that version. Knows nothing of stores or clocks.
"""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

import msgspec

from etude.coordinator.entries import (
    BatchFormed,
    BatchReturned,
    EngineLeft,
    EpochStarted,
    GroupQueued,
    GroupSealed,
    GroupVoided,
    LeaseReleased,
    LeaseTaken,
    PromptDrawn,
    Record,
    Rules,
    RunEnded,
    SlotMoved,
    StepCommitted,
    VersionApplied,
    VersionPublished,
)
from etude.coordinator.slots import GroupSlots, GroupStatus, SlotState
from etude.coordinator.staleness import Admission
from etude.records.errors import IntegrityError
from etude.records.rollout import GroupState


class Counts(msgspec.Struct, frozen=True):
    """Groups by state: `draws` must be the sum of the other four."""

    draws: int = 0
    in_flight: int = 0
    queued: int = 0
    trained: int = 0
    void: int = 0


class DrawInfo(msgspec.Struct, kw_only=True):
    """What is known of one draw. `oldest_step` is the promise of the draw until it is sealed; `step` trained it."""

    draw: int
    task_id: str
    state: GroupState
    oldest_step: int
    oldest_version: int = -1
    digest: str = ""
    step: int | None = None
    reason: str = ""


class VersionRecord(msgspec.Struct, kw_only=True):
    """What the trainer recorded for a version."""

    step: int
    incarnation: int
    digest: str
    manifest_key: str = ""
    """Empty until it is published."""


class StateImage(msgspec.Struct, kw_only=True):
    """The whole state as a value: what a snapshot holds and what tests compare. `slots`: draw -> (states, starts)."""

    epoch: int
    incarnation: int
    step: int
    rules: Rules | None
    draws: list[DrawInfo]
    formed: tuple[int, ...]
    versions: dict[int, VersionRecord]
    engines: dict[str, int]
    leases: dict[str, tuple[str, str]]
    slots: dict[int, tuple[list[SlotState], list[int]]]
    ended: str


class RunState:
    """Mutable state; reads are attributes, writes go through `apply`."""

    def __init__(self) -> None:
        self.epoch = 0
        self.incarnation = 0
        self.rules: Rules | None = None
        self.draws: dict[int, DrawInfo] = {}
        self.open_tasks: dict[str, int] = {}
        """Task id -> draw, for groups in flight or queued."""
        self.trained_tasks: dict[str, int] = {}
        """Task id -> its one trained draw."""
        self.void_reasons: Counter[str] = Counter()
        self.versions: dict[int, VersionRecord] = {}
        self.engines: dict[str, int] = {}
        """Engine -> the version it serves."""
        self.leases: dict[str, tuple[str, str]] = {}
        self.slots: dict[int, GroupSlots] = {}
        """Slots of groups in flight, where moves were recorded."""
        self.ended = ""
        self.admission = Admission(0, 1)
        self._tally: Counter[GroupState] = Counter()
        self._newest = -1

    # -- reads -----------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Committed steps of the surviving lineage."""
        return self.admission.step

    @property
    def counts(self) -> Counts:
        """Groups by state."""
        by = self._tally
        return Counts(
            len(self.draws),
            by[GroupState.IN_FLIGHT],
            by[GroupState.QUEUED],
            by[GroupState.TRAINED],
            by[GroupState.VOID],
        )

    @property
    def newest_version(self) -> int:
        """The largest policy version ever recorded, or -1; the next must be above it."""
        return self._newest

    @property
    def serving_step(self) -> int | None:
        """The smallest step that an engine serves, or None without engines."""
        return min((self.versions[version].step for version in self.engines.values()), default=None)

    def in_state(self, state: GroupState) -> tuple[int, ...]:
        """Draws in that state, in the order drawn."""
        return tuple(draw for draw, info in self.draws.items() if info.state is state)

    def image(self) -> StateImage:
        """The state as a value that shares nothing with it."""
        return msgspec.msgpack.decode(msgspec.msgpack.encode(self._shared_image()), type=StateImage)

    def encode(self) -> bytes:
        """MessagePack of `image()`."""
        return msgspec.msgpack.encode(self._shared_image())

    @classmethod
    def of(cls, image: StateImage) -> RunState:
        """The state that gave this image."""
        state = cls()
        state.epoch, state.incarnation, state.rules = image.epoch, image.incarnation, image.rules
        state.versions, state.engines, state.leases = dict(image.versions), dict(image.engines), dict(image.leases)
        state.ended = image.ended
        for info in image.draws:
            state.draws[info.draw] = info
            state._tally[info.state] += 1
            if info.state is GroupState.TRAINED:
                state.trained_tasks[info.task_id] = info.draw
            elif info.state is GroupState.VOID:
                state.void_reasons[info.reason] += 1
            else:
                state.open_tasks[info.task_id] = info.draw
        for draw, (states, started) in image.slots.items():
            slots = state.slots[draw] = state._new_slots(draw)
            slots.states, slots.started = list(states), list(started)
        state._newest = max(image.versions, default=-1)
        state._new_admission(image.step)
        if image.formed:
            state.admission.form(image.formed)
        return state

    # -- writes ----------------------------------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        """Takes one record in. Raises IntegrityError when it is illegal now; the state is then no longer to be used."""
        match record:
            case EpochStarted():
                self._start_epoch(record)
            case PromptDrawn():
                self._draw(record)
            case SlotMoved():
                self._move_slot(record)
            case GroupSealed():
                self._seal(record)
            case GroupQueued():
                info = self._expect(record.draw, GroupState.IN_FLIGHT, "queued")
                if not info.digest:
                    self._break(f"group {record.draw} is queued but was not sealed")
                self.admission.queue(record.draw)
                self._turn(info, GroupState.QUEUED)
                self.slots.pop(record.draw, None)
            case GroupVoided():
                info = self._expect(record.draw, (GroupState.IN_FLIGHT, GroupState.QUEUED), "void")
                self.admission.void(record.draw)
                self._turn(info, GroupState.VOID)
                info.reason = record.reason
                self.void_reasons[record.reason] += 1
                self.open_tasks.pop(info.task_id)
                self.slots.pop(record.draw, None)
            case BatchFormed():
                self._expect_step(record.step)
                for draw in record.draws:
                    self._expect(draw, GroupState.QUEUED, "put in a batch")
                self.admission.form(record.draws)
            case BatchReturned():
                self._expect_step(record.step)
                self.admission.give_back()
            case StepCommitted():
                self._commit(record)
            case VersionPublished():
                self._publish(record)
            case VersionApplied():
                known = self.versions.get(record.policy_version)
                if known is None or not known.manifest_key:
                    self._break(
                        f"engine {record.engine} applied version {record.policy_version}, which is not published"
                    )
                if known.digest != record.digest:
                    self._break(
                        f"engine {record.engine} reads weights {record.digest} as version {record.policy_version}; the "
                        f"trainer recorded {known.digest}"
                    )
                self.engines[record.engine] = record.policy_version
            case EngineLeft():
                self.engines.pop(record.engine, None)
            case LeaseTaken():
                if record.lease in self.leases:
                    self._break(f"lease {record.lease} is held by {self.leases[record.lease][0]}")
                self.leases[record.lease] = (record.holder, record.subject)
            case LeaseReleased():
                if self.leases.pop(record.lease, None) is None:
                    self._break(f"lease {record.lease} is released but not held")
            case RunEnded():
                self.ended = record.reason
        self._conserve()

    def check(self) -> Counts:
        """Recounts everything from the draws alone. Raises IntegrityError when a book disagrees."""
        tally = Counter(info.state for info in self.draws.values())
        if any(tally[state] != self._tally[state] for state in GroupState):
            self._break(f"the draws are {dict(tally)}, the books say {dict(self._tally)}")
        trained = Counter(info.task_id for info in self.draws.values() if info.state is GroupState.TRAINED)
        if twice := [task for task, times in trained.items() if times > 1]:
            self._break(f"prompt {twice[0]} was trained {trained[twice[0]]} times")
        self._conserve()
        return self.counts

    # -- one record each -------------------------------------------------------------------------------------------

    def _start_epoch(self, record: EpochStarted) -> None:
        if record.epoch <= self.epoch or record.incarnation <= self.incarnation:
            self._break(
                f"epoch {record.epoch} (incarnation {record.incarnation}) follows epoch {self.epoch} (incarnation "
                f"{self.incarnation})"
            )
        if not 0 <= record.resumed_step <= self.step:
            self._break(f"resumed at step {record.resumed_step}, but {self.step} steps were committed")
        self.epoch, self.incarnation, self.rules = record.epoch, record.incarnation, record.rules
        for info in self.draws.values():
            if info.step is not None and info.step > record.resumed_step:
                del self.trained_tasks[info.task_id]
                self.open_tasks[info.task_id] = info.draw
                info.step = None
                self._turn(info, GroupState.QUEUED)
        self.engines.clear()
        self.slots.clear()
        self.ended = ""
        self._new_admission(record.resumed_step)

    def _draw(self, record: PromptDrawn) -> None:
        if record.draw != len(self.draws):
            self._break(f"draw {record.draw} follows {len(self.draws)} draws")
        if (before := self.trained_tasks.get(record.task_id)) is not None:
            self._break(f"prompt {record.task_id} is drawn again though draw {before} of it was trained")
        if (before := self.open_tasks.get(record.task_id)) is not None:
            self._break(
                f"prompt {record.task_id} is drawn again while draw {before} of it is {self.draws[before].state}"
            )
        serving = self.serving_step
        if serving is not None and record.serving_step > serving:
            self._break(f"draw {record.draw} promises step {record.serving_step}, but an engine serves step {serving}")
        self.admission.draw(record.draw, record.serving_step)
        self.draws[record.draw] = DrawInfo(
            draw=record.draw, task_id=record.task_id, state=GroupState.IN_FLIGHT, oldest_step=record.serving_step
        )
        self.open_tasks[record.task_id] = record.draw
        self._tally[GroupState.IN_FLIGHT] += 1

    def _move_slot(self, record: SlotMoved) -> None:
        self._expect(record.draw, GroupState.IN_FLIGHT, f"given the slot state {record.state}")
        if record.draw not in self.slots:
            self.slots[record.draw] = self._new_slots(record.draw)
        self.slots[record.draw].move(record.place, SlotState(record.state))

    def _seal(self, record: GroupSealed) -> None:
        info = self._expect(record.draw, GroupState.IN_FLIGHT, "sealed")
        size = self._known_rules().group_size
        if info.digest or not record.digest:
            self._break(f"group {record.draw} is sealed {'twice' if info.digest else 'without a digest'}")
        if len(set(record.rollouts)) != size or len(record.rollouts) != size:
            self._break(f"group {record.draw} is sealed with {len(set(record.rollouts))} rollouts of {size}")
        if (slots := self.slots.get(record.draw)) is not None and slots.status is not GroupStatus.WHOLE:
            self._break(f"group {record.draw} is sealed though its slots are {[str(state) for state in slots.states]}")
        version = self.versions.get(record.oldest_version)
        if version is None or not version.manifest_key:
            self._break(f"group {record.draw} holds tokens of version {record.oldest_version}, which is not published")
        info.oldest_step = version.step
        self.admission.seal(record.draw, info.oldest_step)
        info.oldest_version, info.digest = record.oldest_version, record.digest

    def _commit(self, record: StepCommitted) -> None:
        self._expect_step(record.step)
        if record.policy_version <= self.newest_version:
            self._break(f"step {record.step} makes version {record.policy_version}; {self.newest_version} was used")
        if self.admission.formed and set(self.admission.formed) != set(record.draws):
            self._break(f"step {record.step} trained draws {record.draws}; its batch was {self.admission.formed}")
        infos = [self._expect(draw, GroupState.QUEUED, f"trained at step {record.step}") for draw in record.draws]
        if not self.admission.formed:
            self.admission.form(record.draws)
        for info in infos:
            if (before := self.trained_tasks.get(info.task_id)) is not None:
                self._break(f"prompt {info.task_id} is trained by draws {before} and {info.draw}")
            if (age := self.step - info.oldest_step) > self._known_rules().staleness:
                self._break(f"group {info.draw} is {age} steps old at step {self.step}; the bound is {self.rules}")
            self.trained_tasks[info.task_id] = info.draw
            self.open_tasks.pop(info.task_id)
            info.step = record.step
            self._turn(info, GroupState.TRAINED)
        self.admission.commit()
        self._record_version(record.policy_version, record.step, record.digest)

    def _publish(self, record: VersionPublished) -> None:
        known = self.versions.get(record.policy_version)
        if known is None:
            if record.policy_version <= self.newest_version:
                self._break(f"version {record.policy_version} is published after {self.newest_version} was used")
            if record.step != self.step:
                self._break(f"version {record.policy_version} of step {record.step} is published at step {self.step}")
            known = self._record_version(record.policy_version, record.step, record.digest)
        if known.manifest_key:
            self._break(f"version {record.policy_version} is published twice")
        if (known.step, known.digest) != (record.step, record.digest):
            self._break(
                f"version {record.policy_version} is published as step {record.step}, digest {record.digest}; the trainer "
                f"recorded step {known.step}, digest {known.digest}"
            )
        known.manifest_key = record.manifest_key

    def _record_version(self, policy_version: int, step: int, digest: str) -> VersionRecord:
        made = VersionRecord(step=step, incarnation=self.incarnation, digest=digest)
        self.versions[policy_version], self._newest = made, policy_version
        return made

    # -- books -----------------------------------------------------------------------------------------------------

    def _expect(self, draw: int, states: GroupState | tuple[GroupState, ...], what: str) -> DrawInfo:
        info = self.draws.get(draw)
        if info is None:
            self._break(f"group {draw} is {what} but was never drawn ({len(self.draws)} draws)")
        if info.state not in (states if isinstance(states, tuple) else (states,)):
            self._break(f"group {draw} is {what} while it is {info.state}")
        return info

    def _expect_step(self, step: int) -> None:
        if step != self.step + 1:
            self._break(f"step {step} follows step {self.step}")

    def _turn(self, info: DrawInfo, to: GroupState) -> None:
        self._tally[info.state] -= 1
        self._tally[to] += 1
        info.state = to

    def _conserve(self) -> None:
        c = self.counts
        parts = f"in flight {c.in_flight} + queued {c.queued} + trained {c.trained} + void {c.void}"
        if c.draws != c.in_flight + c.queued + c.trained + c.void or min(msgspec.structs.astuple(c)) < 0:
            self._break(f"draws {c.draws} are not {parts}")
        if c.in_flight + c.queued != self.admission.live or len(self.open_tasks) != self.admission.live:
            self._break(
                f"{parts}, but admission holds {self.admission.live} and {len(self.open_tasks)} prompts are open"
            )
        if c.trained != len(self.trained_tasks):
            self._break(f"{parts}, but {len(self.trained_tasks)} prompts are trained")

    def _new_admission(self, step: int) -> None:
        rules = self.rules
        self.admission = Admission(rules.staleness, rules.batch_groups, step) if rules else Admission(0, 1, step)
        for info in self.draws.values():
            if info.state in (GroupState.IN_FLIGHT, GroupState.QUEUED):
                self.admission.restore(info.draw, info.oldest_step, info.state is GroupState.QUEUED)

    def _new_slots(self, draw: int) -> GroupSlots:
        rules = self._known_rules()
        return GroupSlots(draw, rules.group_size, rules.tries)

    def _known_rules(self) -> Rules:
        if self.rules is None:
            self._break("a record precedes the first epoch")
        return self.rules

    def _shared_image(self) -> StateImage:
        return StateImage(
            epoch=self.epoch,
            incarnation=self.incarnation,
            step=self.step,
            rules=self.rules,
            draws=list(self.draws.values()),
            formed=self.admission.formed,
            versions=self.versions,
            engines=self.engines,
            leases=self.leases,
            slots={draw: (slots.states, slots.started) for draw, slots in self.slots.items()},
            ended=self.ended,
        )

    def _break(self, what: str) -> NoReturn:
        raise IntegrityError(f"ledger, epoch {self.epoch}: {what}")
