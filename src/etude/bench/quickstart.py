"""The main job on the embedded default: measure, train asynchronously, measure again, say what changed.

Everything it finds is a file in the run folder: evaluations, metrics, the trained policy, `summary.json` and
`quickstart.json`. Stopped early (Ctrl-C), it keeps what was finished and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from etude.agent.config import AgentConfig
from etude.agent.trajectory import render
from etude.bench.config import EvaluationConfig
from etude.bench.evaluate import choose_tasks, evaluate, successes, well_formed
from etude.bench.metrics import Interval, best_of_k_each, mean_interval
from etude.chat.tokenizer import Tokenizer
from etude.coordinator.actors import Fleet, start_fleet
from etude.coordinator.config import CoordinatorConfig
from etude.coordinator.metrics import Row, solved
from etude.coordinator.run import Outcome, Progress
from etude.coordinator.summary import ReadableRollout, Summary, SummaryLine, write_json
from etude.environments.config import EnvironmentsConfig
from etude.inference.config import InferenceConfig
from etude.model.checkpoint import read_config
from etude.records.errors import BadInput
from etude.records.rollout import EvaluationRecord, Rollout
from etude.records.task import Split, Task
from etude.rl.config import RLConfig
from etude.tasks.archive import TaskSet
from etude.trainer.config import TrainerConfig
from etude.weightsync.config import WeightSyncConfig

T = TypeVar("T")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one run is made of: the sections of the config, and where things lie."""

    model: Path
    tasks: Path
    run_dir: Path
    coordinator: CoordinatorConfig
    rl: RLConfig
    trainer: TrainerConfig
    agent: AgentConfig
    inference: InferenceConfig
    environments: EnvironmentsConfig
    weightsync: WeightSyncConfig
    evaluation: EvaluationConfig
    measure: bool = True
    """Evaluate before and after; `etude train` does without."""

    def fleet(
        self, *, model: Path | None = None, store: str = "", train: bool = False
    ) -> contextlib.AbstractAsyncContextManager[Fleet]:
        """The processes that the job runs on, with a trainer when `train`; `model` in place of the job's. See `start_fleet`."""
        return start_fleet(
            model=str(model or self.model),
            tasks=str(self.tasks),
            run_dir=self.run_dir,
            store=store,
            coordinator=self.coordinator,
            agent=self.agent,
            rl=self.rl,
            environments=self.environments,
            inference=self.inference,
            trainer=self.trainer if train else None,
            weightsync=self.weightsync,
        )


class Watch:
    """Told of a run as it goes, for the command line; every method may be left alone."""

    def stage(self, name: str) -> None:
        """A new part of the job begins."""

    def evaluated(self, done: int, total: int, mean: float) -> None:
        """Attempts of an evaluation so far and their mean success."""

    def row(self, row: Row, progress: Progress) -> None:
        """A training step or a probe is done."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """`quickstart.json`: the figures of one quickstart."""

    seed: int
    mean_before: float | None
    mean_after: float | None
    mean_change_low: float | None
    mean_change_high: float | None
    best4_before: float | None
    best4_after: float | None
    well_formed_before: float | None
    well_formed_after: float | None
    steps: int
    seconds: float
    groups_trained: int
    groups_void: int
    ended: str


class Material(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks that a job works on."""

    tasks: TaskSet
    measured: list[Task]
    probes: list[Task]
    prompts: dict[str, str]
    """Task id -> category."""


def prepare(job: Job) -> Material:
    """Checks a job before anything is written or started, and chooses its tasks.

    Raises BadInput where sections of the config contradict each other or what they name is missing or too small.
    """
    trainer, rl, coordinator = job.trainer, job.rl, job.coordinator
    if trainer.groups != coordinator.groups_per_batch:
        expected = f"coordinator.groups_per_batch = {coordinator.groups_per_batch}"
        raise BadInput("config", "trainer.groups", trainer.groups, expected)
    if trainer.group_size != rl.group_size:
        raise BadInput("config", "trainer.group_size", trainer.group_size, f"rl.group_size = {rl.group_size}")
    if job.evaluation.best_of > job.evaluation.attempts:
        expected = f"at most evaluation.attempts = {job.evaluation.attempts}"
        raise BadInput("config", "evaluation.best_of", job.evaluation.best_of, expected)
    for name, path in (("model", job.model), ("tasks", job.tasks)):
        if not path.exists():
            raise BadInput(str(path), name, "missing", "an existing path")
    read_config(job.model)
    tasks = TaskSet.open(job.tasks)
    measured, probes = [], []
    if job.measure or coordinator.probe_every:
        held_out = _split(tasks, "evaluation.split", job.evaluation.split)
        if job.measure:
            measured = choose_tasks(held_out, job.evaluation.tasks, job.evaluation.per_module, job.evaluation.seed)
        if coordinator.probe_every:
            probes = choose_tasks(held_out, coordinator.probe_tasks, 1, job.evaluation.seed + 1)
    return Material(
        tasks=tasks,
        measured=measured,
        probes=probes,
        prompts={task.id: task.operator for task in _split(tasks, "coordinator.split", coordinator.split)},
    )


def _split(tasks: TaskSet, key: str, name: str) -> Sequence[Task]:
    if name not in set(Split):
        raise BadInput("config", key, name, f"one of {', '.join(Split)}")
    found = tasks.split(Split(name))
    if not found:
        raise BadInput("config", key, name, "a split that the task set holds")
    return found


async def run_job(job: Job, watch: Watch, stop: asyncio.Event) -> Result:
    """The whole job. `stop` ends it early: the step at hand is finished, what was found is kept."""
    material = prepare(job)
    task_set, chosen, prompts = material.tasks, material.measured, material.prompts
    began = time.monotonic()
    job.run_dir.mkdir(parents=True, exist_ok=True)
    watch.stage("starting engine, rollout workers and trainer")
    store = job.weightsync.store or str((job.run_dir / "store").resolve())
    async with job.fleet(store=store, train=True) as fleet:
        before = None
        if job.measure:
            watch.stage(f"before: {len(chosen)} held-out tasks x {job.evaluation.attempts} attempts")
            before = await _measure(job, fleet, chosen, fleet.engine.digest, 0, watch, stop)
            if before is not None:
                write_json(job.run_dir / "evaluation_before.json", before)
        assert fleet.trainer is not None
        outcome: Outcome | None = None
        rollouts: list[Rollout] = []
        if not stop.is_set():
            watch.stage(f"training: {len(prompts)} prompts, batches of {job.coordinator.groups_per_batch} groups")
            coordinator = fleet.coordinator(
                config=job.coordinator,
                rl=job.rl,
                prompts=prompts,
                probes=[task.id for task in material.probes],
                tasks=str(job.tasks),
                store=store,
                run_dir=job.run_dir,
            )
            outcome = await coordinator.run(stop, watch.row)
            rollouts = await coordinator.latest()
            await fleet.trainer.save(str((job.run_dir / "policy").resolve()))
        after = None
        if job.measure and outcome is not None and not stop.is_set():
            watch.stage("after: the same tasks, attempts and seeds")
            after = await _measure(job, fleet, chosen, outcome.digest, outcome.policy_version, watch, stop)
            if after is not None:
                write_json(job.run_dir / "evaluation_after.json", after)
    write_json(job.run_dir / "readable.json", pick_readable(rollouts, task_set, Tokenizer.load(job.model)))
    result = _result(job, before, after, outcome, chosen, time.monotonic() - began)
    write_json(job.run_dir / "quickstart.json", result)
    write_json(job.run_dir / "summary.json", _summary(job, result, before, after, chosen))
    return result


async def _measure(
    job: Job,
    fleet: Fleet,
    tasks: Sequence[Task],
    digest: str,
    version: int,
    watch: Watch,
    stop: asyncio.Event,
) -> EvaluationRecord | None:
    """One evaluation, or None when it was stopped."""
    return await until_stopped(
        evaluate(
            fleet.workers,
            tasks,
            attempts=job.evaluation.attempts,
            temperature=job.evaluation.temperature,
            seed=job.evaluation.seed,
            weights_digest=digest,
            policy_version=version,
            progress=watch.evaluated,
        ),
        stop,
    )


async def until_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """What `work` returns, or None when `stop` was set first; `work` is then cut off and has ended."""
    running = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        running.cancel()
        await asyncio.wait([running])
        return None
    finally:
        stopped.cancel()


def pick_readable(rollouts: Sequence[Rollout], tasks: TaskSet, tokenizer: Tokenizer) -> list[ReadableRollout]:
    """Three of the newest rollouts: solved at once, solved after a failing run, not solved (as far as there are such)."""
    kinds: list[tuple[str, Callable[[Rollout], bool]]] = [
        ("solved after a failing run", lambda r: solved(r) and _edits(r) > 1),
        ("solved at once", lambda r: solved(r) and _edits(r) == 1),
        ("not solved", lambda r: not solved(r) and r.well_formed),
    ]
    picked = []
    for label, fits in kinds:
        found = next((rollout for rollout in reversed(rollouts) if fits(rollout)), None)
        if found is None:
            continue
        task = tasks.get(found.task_id)
        text = render(found, tokenizer, task)
        outcome = f"{label}, reward {found.rewards.get('total', 0.0):+.3f}"
        picked.append(ReadableRollout(title=task.name, outcome=outcome, solved=solved(found), parts=_parts(text)))
    return picked


def _edits(rollout: Rollout) -> int:
    return sum(call.name == "edit_file" for call in rollout.tool_calls)


def _parts(text: str) -> tuple[tuple[str, str], ...]:
    """Cuts a rendered rollout where an unindented line begins a new part; its first word is the part's kind."""
    parts: list[list[str]] = []
    for line in text.split("\n"):
        if (line and not line.startswith(" ")) or not parts:
            parts.append([line])
        else:
            parts[-1].append(line)
    return tuple((lines[0].split(" ", 1)[0].rstrip(":") or "note", "\n".join(lines)) for lines in parts)


def _paired(before: EvaluationRecord, after: EvaluationRecord, tasks: Sequence[Task]) -> Interval:
    change = successes(after).mean(axis=1) - successes(before).mean(axis=1)
    return mean_interval(change, [task.module for task in tasks])


def _result(
    job: Job,
    before: EvaluationRecord | None,
    after: EvaluationRecord | None,
    outcome: Outcome | None,
    tasks: Sequence[Task],
    seconds: float,
) -> Result:
    def mean(record: EvaluationRecord | None) -> float | None:
        return None if record is None else float(successes(record).mean())

    def best(record: EvaluationRecord | None) -> float | None:
        return None if record is None else float(best_of_k_each(successes(record), job.evaluation.best_of).mean())

    def formed(record: EvaluationRecord | None) -> float | None:
        return None if record is None else float(well_formed(record).mean())

    interval = _paired(before, after, tasks) if before is not None and after is not None else None
    return Result(
        seed=job.coordinator.seed,
        mean_before=mean(before),
        mean_after=mean(after),
        mean_change_low=interval.low if interval else None,
        mean_change_high=interval.high if interval else None,
        best4_before=best(before),
        best4_after=best(after),
        well_formed_before=formed(before),
        well_formed_after=formed(after),
        steps=outcome.steps if outcome else 0,
        seconds=seconds,
        groups_trained=outcome.groups_trained if outcome else 0,
        groups_void=outcome.groups_void if outcome else 0,
        ended=outcome.reason if outcome else "stopped before training",
    )


def _summary(
    job: Job,
    result: Result,
    before: EvaluationRecord | None,
    after: EvaluationRecord | None,
    tasks: Sequence[Task],
) -> Summary:
    lines: list[SummaryLine] = []
    notes: list[str] = []
    if before is not None and after is not None:
        k = job.evaluation.best_of
        modules = [task.module for task in tasks]
        rows = [
            ("mean success", successes(before).mean(axis=1), successes(after).mean(axis=1)),
            (f"best of {k}", best_of_k_each(successes(before), k), best_of_k_each(successes(after), k)),
            ("well-formed rollouts", well_formed(before).mean(axis=1), well_formed(after).mean(axis=1)),
        ]
        for name, first, second in rows:
            interval = mean_interval(np.asarray(second - first), modules)
            lines.append(SummaryLine(name, float(first.mean()), float(second.mean()), interval.low, interval.high))
        notes.append(
            f"{len(tasks)} held-out tasks, {job.evaluation.attempts} attempts each at temperature {job.evaluation.temperature}; "
            "intervals by bootstrap over source modules, then tasks."
        )
    elif job.measure:
        notes.append("The run was stopped before it was measured again: there is no before/after comparison.")
    facts = {
        "steps": str(result.steps),
        "groups trained": str(result.groups_trained),
        "groups void": str(result.groups_void),
        "minutes in all": f"{result.seconds / 60:.1f}",
        "seed": str(result.seed),
        "ended by": result.ended,
    }
    return Summary(
        title="Étude: a coding agent before and after reinforcement learning",
        run=job.run_dir.name,
        facts=facts,
        table=tuple(lines),
        notes=tuple(notes),
    )
