"""The run loop: draws prompts, runs groups, forms batches, trains, publishes and swaps, all at once (SPEC S2).

One asyncio program over handles, so that the same loop runs over Ray actors or in process. Every fact goes through the
ledger, which checks it (conservation, staleness, digests); a broken invariant stops the run. Decides nothing about
rewards, losses or weights. In deterministic mode nothing here depends on a clock or on who answers first.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from etude.coordinator.config import CoordinatorConfig
from etude.coordinator.entries import (
    BatchFormed,
    BatchReturned,
    GroupQueued,
    GroupSealed,
    GroupVoided,
    PromptDrawn,
    Rules,
    RunEnded,
    SlotMoved,
    StepCommitted,
    VersionApplied,
    VersionPublished,
)
from etude.coordinator.groups import GroupArchive, StoredGroup
from etude.coordinator.ledger import Ledger
from etude.coordinator.messages import RolloutJob, RolloutResult, StepReport, TrainerHandle, WorkerHandle
from etude.coordinator.metrics import ProbeMetrics, Row, StepMetrics, append, group_figures, solved
from etude.coordinator.seeds import order_seed, rollout_seed
from etude.coordinator.slots import GroupStatus, SlotState
from etude.coordinator.staleness import Refusal
from etude.inference.client import EngineClient
from etude.inference.protocol import ApplyRequest
from etude.records.errors import BadInput, InfrastructureError, IntegrityError
from etude.records.rollout import CauseClass, Group, GroupState, Rollout, StopReason
from etude.records.task import Task
from etude.rl.advantage import group_advantages
from etude.rl.config import RLConfig
from etude.rl.curriculum import Curriculum, SignalEpoch, UniformEpoch
from etude.rl.habits import GivesUpMonitor
from etude.rl.rewards import TOTAL
from etude.weightsync.store import ObjectStore

RUN_PREFIX = "run"


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run is; for people and for the reports of a quickstart."""

    step: int = 0
    steps: int = 0
    draws: int = 0
    in_flight: int = 0
    queued: int = 0
    trained: int = 0
    void: int = 0
    rollouts: int = 0
    seconds: float = 0.0
    ended: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended: `reason` is `steps`, `minutes`, `prompts` or `stopped`."""

    reason: str
    steps: int
    groups_trained: int
    groups_void: int
    rollouts: int
    policy_version: int
    digest: str
    seconds: float


@dataclass
class _Tally:
    """What was seen since the last step's line."""

    rollouts: int = 0
    tokens: int = 0
    since: float = 0.0
    apply_s: float = 0.0
    alarm: str = ""


class TrainingRun:
    """One run over its handles. `run()` returns its outcome; `stop()` ends it cleanly from the same event loop.

    `prompts` maps each task id to its category (the mutation operator, for repair tasks), which the curriculum may use.
    """

    def __init__(
        self,
        *,
        config: CoordinatorConfig,
        rl: RLConfig,
        prompts: Mapping[str, str],
        workers: Sequence[WorkerHandle],
        trainer: TrainerHandle,
        engine: EngineClient,
        store: ObjectStore,
        run_dir: Path,
        probes: Sequence[Task] = (),
        on_row: Callable[[Row], None] = lambda row: None,
    ) -> None:
        if config.deterministic and (config.staleness != 0 or len(workers) != 1):
            raise BadInput("coordinator", "staleness", config.staleness, "0, and one worker, in deterministic mode")
        self._config, self._rl, self._workers, self._trainer = config, rl, list(workers), trainer
        self._engine, self._store, self._run_dir, self._on_row = engine, store, run_dir, on_row
        self._probes = probes
        self._curriculum: Curriculum = (
            SignalEpoch(prompts, order_seed(config.seed))
            if rl.curriculum == "signal"
            else UniformEpoch(list(prompts), order_seed(config.seed))
        )
        self._monitor = GivesUpMonitor(rl.habits.window, rl.habits.alarm_ratio)
        self._busy = [0] * len(self._workers)
        self._failures: dict[int, str] = {}
        self._archive = GroupArchive(store, RUN_PREFIX)
        self._sealed: dict[int, Group] = {}
        # Groups take turns where the order of their rollouts must not hang on who answers first.
        self._turns: contextlib.AbstractAsyncContextManager[object] = (
            asyncio.Lock() if config.deterministic else contextlib.nullcontext()
        )
        self._tally = _Tally()
        self._changed = asyncio.Event()
        self._apply_lock = asyncio.Lock()
        self._flying: set[asyncio.Task[None]] = set()
        self._reason = ""
        self._rollouts = self._voided_in_a_row = 0
        self._digest = ""
        self.latest: deque[Rollout] = deque(maxlen=max(1, config.keep_rollouts))

    # -- outside view ----------------------------------------------------------------------------------------------

    def stop(self, reason: str = "stopped") -> None:
        """Ends the run after the step that is being trained; groups in flight become void, visibly."""
        if not self._reason:
            self._reason = reason
        self._changed.set()

    @property
    def progress(self) -> Progress:
        """Where the run is."""
        if not hasattr(self, "_ledger"):
            return Progress(steps=self._config.steps)
        counts = self._ledger.state.counts
        return Progress(
            step=self._ledger.state.step,
            steps=self._config.steps,
            draws=counts.draws,
            in_flight=counts.in_flight,
            queued=counts.queued,
            trained=counts.trained,
            void=counts.void,
            rollouts=self._rollouts,
            seconds=self._elapsed(),
            ended=self._reason,
        )

    async def run(self) -> Outcome:
        """Runs to the end. Raises IntegrityError when an invariant breaks, InfrastructureError when nothing works any more."""
        config = self._config
        rules = Rules(
            staleness=config.staleness,
            batch_groups=config.groups_per_batch,
            group_size=self._rl.group_size,
            tries=config.rollout_attempts,
        )
        self._ledger = await Ledger.open(self._store, RUN_PREFIX, rules)
        self._began = self._tally.since = time.monotonic()
        try:
            await self._first_version()
            async with asyncio.TaskGroup() as group:
                self._group = group
                clock = group.create_task(self._watch_clock())
                try:
                    await self._train()
                finally:
                    clock.cancel()
                    for task in self._flying:
                        task.cancel()
            self._void_unfinished()
            await self._ledger.append(RunEnded(reason=self._reason))
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from errors
        finally:
            await self._ledger.close()
        counts = self._ledger.state.check()
        return Outcome(
            reason=self._reason,
            steps=self._ledger.state.step,
            groups_trained=counts.trained,
            groups_void=counts.void,
            rollouts=self._rollouts,
            policy_version=max(self._ledger.state.engines.values(), default=0),
            digest=self._digest,
            seconds=self._elapsed(),
        )

    # -- prompts and groups ----------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Draws as long as admission lets it and the remaining steps can use the groups."""
        state, config = self._ledger.state, self._config
        while not self._reason:
            serving = state.serving_step
            wanted = (config.steps - state.step) * config.groups_per_batch
            if serving is None or state.admission.live >= wanted or not state.admission.may_draw(serving):
                return
            task_id = self._curriculum.draw()
            if task_id is None:
                return
            draw = state.counts.draws
            self._ledger.record(PromptDrawn(draw=draw, task_id=task_id, serving_step=serving))
            flight = self._group.create_task(self._run_group(draw, task_id))
            self._flying.add(flight)
            flight.add_done_callback(self._flying.discard)

    async def _run_group(self, draw: int, task_id: str) -> None:
        async with self._turns:
            results = await self._run_places(draw, task_id)
        slots = self._ledger.state.slots[draw]
        if slots.status is GroupStatus.VOID:
            detail = self._failures.pop(draw)
            self._ledger.record(GroupVoided(draw=draw, reason=detail))
            self._curriculum.give_back(task_id)
            self._voided_in_a_row += 1
            if self._voided_in_a_row >= self._config.void_limit:
                raise InfrastructureError(f"{self._voided_in_a_row} groups in a row are void; the last: {detail}")
        else:
            self._failures.pop(draw, None)
            self._voided_in_a_row = 0
            await self._seal(draw, task_id, [result for result in results if result is not None])
        self._fill()
        self._changed.set()

    async def _run_places(self, draw: int, task_id: str) -> list[RolloutResult | None]:
        places = range(self._rl.group_size)
        if self._config.deterministic:
            return [await self._run_place(draw, place, task_id) for place in places]
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._run_place(draw, place, task_id)) for place in places]
        return [task.result() for task in running]

    async def _run_place(self, draw: int, place: int, task_id: str) -> RolloutResult | None:
        """One place of the group to its scored end, over fresh tries; None when it became void before it ever ran."""
        job = RolloutJob(task_id=task_id, attempt=place, seed=rollout_seed(self._config.seed, task_id, place))
        result: RolloutResult | None = None
        while True:
            slots = self._ledger.state.slots.get(draw)
            if slots is not None and slots.status is GroupStatus.VOID:
                return result
            self._ledger.record(SlotMoved(draw=draw, place=place, state=SlotState.ACTING))
            index = self._busy.index(min(self._busy))
            self._busy[index] += 1
            detail = ""
            try:
                result = await self._workers[index].run(job)
                detail = result.rollout.error
            except InfrastructureError as error:
                detail = str(error)
            finally:
                self._busy[index] -= 1
            if self._ledger.state.slots[draw].status is GroupStatus.VOID:
                return result
            if result is not None and result.rollout.cause is CauseClass.POLICY:
                if result.rollout.stop_reason is StopReason.CANCELLED:
                    raise IntegrityError(f"rollout {result.rollout.id} was cancelled by nobody")
                self._ledger.record(SlotMoved(draw=draw, place=place, state=SlotState.DONE))
                self._rollouts += 1
                self._tally.rollouts += 1
                self._tally.tokens += sum(len(g.sampled_ids) for g in result.rollout.generations)
                return result
            tries = self._ledger.state.slots[draw].started[place]
            self._failures[draw] = detail[:200] or "infrastructure"
            ahead = SlotState.VOID if tries >= self._config.rollout_attempts else SlotState.WAITING
            self._ledger.record(SlotMoved(draw=draw, place=place, state=ahead, detail=detail[:200]))
            if ahead is SlotState.VOID:
                return result

    async def _seal(self, draw: int, task_id: str, results: Sequence[RolloutResult]) -> None:
        rollouts = tuple(result.rollout for result in results)
        totals = [rollout.rewards[TOTAL] for rollout in rollouts]
        if self._config.permute_rewards:
            random.Random(rollout_seed(self._config.seed, task_id, -1)).shuffle(totals)
        versions = [v for rollout in rollouts for g in rollout.generations for v in g.policy_versions]
        group = Group(
            id=f"{draw:06d}-{task_id[:12]}",
            draw=draw,
            task_id=task_id,
            rollouts=rollouts,
            advantages=group_advantages(totals, self._rl.group_size),
            oldest_version=min(versions, default=max(self._ledger.state.engines.values())),
        )
        blobs = {digest: blob for result in results for digest, blob in result.blobs.items()}
        digest = await asyncio.to_thread(self._archive.keep, group, blobs)
        self._sealed[draw] = group
        self._ledger.record(
            GroupSealed(
                draw=draw,
                rollouts=tuple(f"{rollout.id}" for rollout in rollouts),
                oldest_version=group.oldest_version,
                digest=digest,
            ),
            GroupQueued(draw=draw),
        )
        self.latest.extend(rollouts)
        wins = [solved(rollout) for rollout in rollouts]
        self._curriculum.observe(task_id, any(wins) and not all(wins))
        alarm = self._monitor.observe(group)
        if alarm is not None:
            self._tally.alarm = str(alarm)

    def _void_unfinished(self) -> None:
        """What was in flight at the end is void, with the reason; what was ready stays queued for a later epoch."""
        for draw in self._ledger.state.in_state(GroupState.IN_FLIGHT):
            self._ledger.record(GroupVoided(draw=draw, reason=f"run ended: {self._reason}"))

    # -- training and weights --------------------------------------------------------------------------------------

    async def _first_version(self) -> None:
        first = await self._trainer.publish_first()
        self._digest = first.digest
        await self._ledger.append(
            VersionPublished(
                policy_version=first.policy_version, step=0, digest=first.digest, manifest_key=first.manifest_key
            )
        )
        await self._apply(first.policy_version, first.manifest_key)

    async def _apply(self, policy_version: int, manifest_key: str) -> None:
        async with self._apply_lock:
            if policy_version <= max(self._ledger.state.engines.values(), default=-1):
                return  # a later version that covers it is served
            began = time.monotonic()
            reply = await self._engine.apply(ApplyRequest(manifest_key=manifest_key))
            self._tally.apply_s += time.monotonic() - began
            health = await self._engine.health()
            await self._ledger.append(
                VersionApplied(engine=health.engine_id, policy_version=reply.policy_version, digest=reply.digest)
            )

    async def _sync(self, policy_version: int) -> None:
        """Follows a version from the trainer's background upload to the engine."""
        published = await self._trainer.published(policy_version)
        if published.policy_version != policy_version:
            return  # a later version covers it, whose own sync comes as soon as its step is in the ledger
        await self._ledger.append(
            VersionPublished(
                policy_version=published.policy_version,
                step=published.step,
                digest=published.digest,
                manifest_key=published.manifest_key,
            )
        )
        await self._apply(published.policy_version, published.manifest_key)
        self._fill()
        self._changed.set()

    async def _next_batch(self) -> tuple[int, ...] | None:
        """Waits until a batch may be formed; None when the run is to end."""
        while True:
            self._changed.clear()
            state = self._ledger.state
            if self._ledger.error is not None:
                raise self._ledger.error
            if state.step >= self._config.steps:
                self.stop("steps")
            if self._reason:
                return None
            self._fill()
            found = state.admission.next_batch()
            if not isinstance(found, Refusal):
                return found
            if not self._curriculum.remaining and state.admission.ready == state.admission.live:
                self.stop("prompts")
                return None
            await self._changed.wait()

    async def _train(self) -> None:
        syncing: set[asyncio.Task[None]] = set()
        while True:
            began = time.monotonic()
            draws = await self._next_batch()
            if draws is None:
                break
            waited = time.monotonic() - began
            state = self._ledger.state
            step, version = state.step + 1, state.newest_version + 1
            self._ledger.record(BatchFormed(step=step, draws=draws))
            self._fill()
            groups = [self._sealed[draw] for draw in draws]
            staleness = [state.step - state.versions[group.oldest_version].step for group in groups]
            began = time.monotonic()
            try:
                await self._prove_engine()
                batch = await asyncio.to_thread(self._load, [state.draws[draw].digest for draw in draws])
                blobs = {key: value for item in batch for key, value in item.blobs.items()}
                report = await self._trainer.step([item.record for item in batch], blobs, version)
            except BaseException as error:
                if self._ledger.error is None:
                    self._ledger.record(BatchReturned(step=step, reason=type(error).__name__))
                raise
            took = time.monotonic() - began
            await self._ledger.append(
                StepCommitted(step=step, draws=draws, policy_version=version, digest=report.digest)
            )
            self._digest = report.digest
            for draw in draws:
                del self._sealed[draw]
            sync = self._group.create_task(self._sync(version))
            syncing.add(sync)
            sync.add_done_callback(syncing.discard)
            self._say(self._row(report, groups, staleness, took, waited))
            every = self._config.probe_every
            if every and step % every == 0 and not self._config.deterministic and step < self._config.steps:
                flight = self._group.create_task(self._probe(step))
                self._flying.add(flight)
                flight.add_done_callback(self._flying.discard)
        for task in self._flying:
            task.cancel()
        if syncing:
            await asyncio.gather(*syncing)
        await self._prove_engine()

    def _load(self, digests: Sequence[str]) -> list[StoredGroup]:
        return [self._archive.load(digest) for digest in digests]

    async def _prove_engine(self) -> None:
        """Hashes the live weights once more: tokens of this version are trained only if its tensors are still its own."""
        await self._engine.health(verify=True)

    def _row(
        self, report: StepReport, groups: Sequence[Group], staleness: Sequence[int], took: float, waited: float
    ) -> StepMetrics:
        counts, tally, figures = self._ledger.state.counts, self._tally, report.figures
        now = time.monotonic()
        span = max(now - tally.since, 1e-9)
        self._tally = _Tally(since=now)
        return StepMetrics(
            step=report.step,
            time_s=self._elapsed(),
            policy_version=report.policy_version,
            **msgspec.structs.asdict(group_figures(groups)),
            kl=figures.get("kl", 0.0),
            entropy=figures["entropy"],
            grad_norm=figures["grad_norm"],
            importance_mean=figures["importance_mean"],
            importance_max=figures["importance_max"],
            importance_clipped=figures["importance_clipped"],
            replaced_routes=figures["replaced"],
            logprob_gap=figures["logp_gap_mean"],
            staleness_mean=sum(staleness) / len(staleness),
            staleness_max=max(staleness),
            step_s=took,
            wait_s=waited,
            rollouts_per_minute=60.0 * tally.rollouts / span,
            tokens_per_second=tally.tokens / span,
            groups_void=counts.void,
            in_flight=counts.in_flight,
            queued=counts.queued,
            apply_s=tally.apply_s,
            alarm=tally.alarm,
        )

    async def _probe(self, step: int) -> None:
        """A look at held-out tasks under the weights being served; shown beside the training curves, decides nothing."""
        attempts = self._config.probe_attempts
        version = max(self._ledger.state.engines.values())

        async def one(task: Task, attempt: int) -> bool | None:
            index = self._busy.index(min(self._busy))
            self._busy[index] += 1
            try:
                seed = rollout_seed(self._config.seed, f"probe:{task.id}", attempt)
                job = RolloutJob(task_id=task.id, attempt=attempt, seed=seed, keep_blobs=False)
                rollout = (await self._workers[index].run(job)).rollout
                return solved(rollout) if rollout.cause is CauseClass.POLICY else None
            except InfrastructureError:
                return None
            finally:
                self._busy[index] -= 1

        async with asyncio.TaskGroup() as group:
            running = [[group.create_task(one(task, a)) for a in range(attempts)] for task in self._probes]
        rows = [[win for attempt in row if (win := attempt.result()) is not None] for row in running]
        if wins := [row for row in rows if row]:
            self._say(
                ProbeMetrics(
                    step=step,
                    time_s=self._elapsed(),
                    policy_version=version,
                    tasks=len(wins),
                    attempts=attempts,
                    mean=sum(map(sum, wins)) / sum(map(len, wins)),
                    best_of_k=sum(map(any, wins)) / len(wins),
                )
            )

    # -- small things ----------------------------------------------------------------------------------------------

    def _say(self, row: Row) -> None:
        append(self._run_dir / "metrics.jsonl", row)
        self._on_row(row)

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    async def _watch_clock(self) -> None:
        """Ends the run when its minutes are over, or when the ledger stops."""
        minutes = self._config.minutes
        stopped = asyncio.ensure_future(self._ledger.stopped())
        try:
            timeout = 60.0 * minutes if minutes and not self._config.deterministic else None
            await asyncio.wait([stopped], timeout=timeout)
            self.stop("minutes")
        finally:
            stopped.cancel()


def first_cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf of a group of errors that tells a cause: an error of ours before a cancellation."""
    leaves: list[BaseException] = []

    def walk(error: BaseException) -> None:
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                walk(inner)
        else:
            leaves.append(error)

    walk(errors)
    return next((leaf for leaf in leaves if not isinstance(leaf, asyncio.CancelledError)), leaves[0])
