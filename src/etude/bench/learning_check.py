"""The learning check: does the run teach repair, or would shuffled rewards, a sharper temperature or forced retries do as well?

Treated and control runs (total rewards permuted within each group, all else equal) from the same starter; the same
held-out tasks before and after, at the temperature that suits the starter best on dev tasks. Every run and every
evaluation is a file of its own under one folder, so the check goes on where it was stopped.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from etude.bench.evaluate import choose_tasks, evaluate, successes, well_formed
from etude.bench.metrics import Interval, best_of_k_each, mean_interval, solved_given_formed
from etude.bench.quickstart import Job, Watch, run_job, until_stopped
from etude.coordinator.metrics import StepMetrics, read, solved
from etude.coordinator.summary import write_json
from etude.records.errors import BadInput, InfrastructureError
from etude.records.rollout import EvaluationRecord, Rollout
from etude.records.task import Split, Task
from etude.tasks.archive import TaskSet

Floats = npt.NDArray[np.float64]
TEMPERATURES = (1.0, 0.7, 0.4)
BARS = {
    "mean_change_low": 0.05,
    "mean_change_each": 0.03,
    "treated_minus_control_low": 0.05,
    "best4_change_low": -0.05,
    "solved_given_formed_low": 0.0,
}


class CheckPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is run: seeds of treated and control runs, dev tasks for the choice of temperature."""

    treated: tuple[int, ...] = (0, 1, 2)
    control: tuple[int, ...] = (0, 1)
    dev_tasks: int = 60
    dev_attempts: int = 4


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation and the number of distinct solutions that it found per task."""

    record: EvaluationRecord
    distinct: tuple[int, ...]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """`docs/learning_check.json`."""

    mean_before: float
    mean_after: float
    mean_change_low: float
    mean_change_high: float
    mean_change_each: tuple[float, ...]
    treated_minus_control: float
    treated_minus_control_low: float
    control_change: float
    best4_before: float
    best4_after: float
    best4_change_low: float
    best8_before: float
    best8_after: float
    solved_given_formed_before: float
    solved_given_formed_after: float
    solved_given_formed_low: float
    well_formed_before: float
    well_formed_after: float
    forced_retry_mean: float
    after_minus_forced_retry: float
    after_minus_forced_retry_low: float
    entropy_before: float
    entropy_after: float
    distinct_before: float
    distinct_after: float
    temperature: float
    dev_means: dict[str, float]
    tasks: int
    modules: int
    attempts: int
    minutes_each: float
    steps_each: tuple[int, ...]
    bars: dict[str, bool]


class LearningCheck:
    """Runs what is missing under `folder` and reads the rest."""

    def __init__(self, job: Job, folder: Path, plan: CheckPlan, watch: Watch) -> None:
        self._job, self._folder, self._plan, self._watch = job, folder, plan, watch
        tasks = TaskSet.open(job.tasks)
        chosen = job.evaluation
        self.tasks = choose_tasks(tasks.split(Split.HELD_OUT), chosen.tasks, chosen.per_module, chosen.seed)
        self.dev = choose_tasks(tasks.split(Split.DEV), plan.dev_tasks, chosen.per_module, chosen.seed)
        self.modules = [task.module for task in self.tasks]
        if len(set(self.modules)) < 40 or len(self.tasks) < 150:
            found = f"{len(self.tasks)} of {len(set(self.modules))} modules"
            raise BadInput("learning check", "tasks", found, "at least 150 held-out tasks of at least 40 modules")

    async def run(self, stop: asyncio.Event) -> Figures | None:
        """Everything in order; None when it was stopped before the end (call it again to go on)."""
        model = self._job.model
        dev_means: dict[str, float] = {}
        for temperature in TEMPERATURES:
            name = f"dev_t{temperature:g}"
            dev = await self._evaluation(name, model, self.dev, self._plan.dev_attempts, temperature, stop)
            if dev is None:
                return None
            dev_means[f"{temperature:g}"] = float(successes(dev.record).mean())
        best = max(TEMPERATURES, key=lambda t: dev_means[f"{t:g}"])
        before = await self._held_out("before", model, best, stop)
        retried = await self._held_out("before_forced_retry", model, best, stop, force_retry=True)
        if before is None or retried is None:
            return None
        afters: dict[str, list[Measured]] = {"treated": [], "control": []}
        names = [("treated", seed) for seed in self._plan.treated] + [("control", seed) for seed in self._plan.control]
        for kind, seed in sorted(names, key=lambda pair: (pair[1], pair[0] == "control")):
            if not await self._train(kind, seed, stop):
                return None
            after = await self._held_out(f"{kind}_{seed}", self._run_dir(kind, seed) / "policy", best, stop)
            if after is None:
                return None
            afters[kind].append(after)
        return self._figures(before, retried, afters, best, dev_means)

    # -- resumable parts -------------------------------------------------------------------------------------------

    def _run_dir(self, kind: str, seed: int) -> Path:
        return self._folder / f"{kind}_{seed}"

    async def _train(self, kind: str, seed: int, stop: asyncio.Event) -> bool:
        """One run; an unfinished one of an earlier try is set aside and run anew."""
        folder = self._run_dir(kind, seed)
        done = folder / "done"
        if done.exists():
            return True
        if folder.exists():
            aside = 1
            while (stale := folder.with_name(f"{folder.name}.unfinished{aside}")).exists():
                aside += 1
            folder.rename(stale)
        self._watch.stage(f"run {kind} seed {seed}")
        coordinator = self._job.coordinator.model_copy(update={"seed": seed, "permute_rewards": kind == "control"})
        job = msgspec.structs.replace(self._job, run_dir=folder, coordinator=coordinator, measure=False)
        result = await run_job(job, self._watch, stop)
        if stop.is_set() or result.ended.startswith("stopped"):
            return False
        done.write_text("")
        return True

    async def _held_out(
        self, name: str, model: Path, temperature: float, stop: asyncio.Event, *, force_retry: bool = False
    ) -> Measured | None:
        attempts = self._job.evaluation.attempts
        return await self._evaluation(name, model, self.tasks, attempts, temperature, stop, force_retry=force_retry)

    async def _evaluation(
        self,
        name: str,
        model: Path,
        tasks: Sequence[Task],
        attempts: int,
        temperature: float,
        stop: asyncio.Event,
        *,
        force_retry: bool = False,
    ) -> Measured | None:
        path = self._folder / f"eval_{name}.json"
        if path.exists():
            kept = msgspec.json.decode(path.read_bytes(), type=Measured)
            if kept.record.task_ids == tuple(task.id for task in tasks) and kept.record.attempts == attempts:
                return kept
        if stop.is_set():
            return None
        self._watch.stage(f"evaluation {name}: {len(tasks)} tasks x {attempts} at temperature {temperature:g}")
        found: defaultdict[str, set[str]] = defaultdict(set)

        def keep(rollout: Rollout) -> None:
            if solved(rollout):
                found[rollout.task_id].add(hashlib.sha256(repr(sorted(rollout.diff.items())).encode()).hexdigest())

        job = self._job
        async with msgspec.structs.replace(job, run_dir=self._folder).fleet(model=model) as fleet:
            record = await until_stopped(
                evaluate(
                    fleet.workers,
                    tasks,
                    attempts=attempts,
                    temperature=temperature,
                    seed=job.evaluation.seed,
                    weights_digest=fleet.engine.digest,
                    policy_version=0,
                    force_retry=force_retry,
                    progress=self._watch.evaluated,
                    keep=keep,
                ),
                stop,
            )
        if record is None:
            return None
        measured = Measured(record=record, distinct=tuple(len(found[task.id]) for task in tasks))
        write_json(path, measured)
        return measured

    # -- figures ---------------------------------------------------------------------------------------------------

    def _interval(self, per_task: Floats) -> Interval:
        return mean_interval(per_task, self.modules)

    def _figures(
        self,
        before: Measured,
        retried: Measured,
        afters: dict[str, list[Measured]],
        temperature: float,
        dev_means: dict[str, float],
    ) -> Figures:
        def mean(measured: Measured) -> Floats:
            return np.asarray(successes(measured.record).mean(axis=1), dtype=np.float64)

        def best(measured: Measured, k: int) -> Floats:
            return best_of_k_each(successes(measured.record), k)

        def averaged(rows: Sequence[Floats]) -> Floats:
            return np.asarray(np.mean(np.stack(list(rows)), axis=0), dtype=np.float64)

        treated, control = afters["treated"], afters["control"]
        first = mean(before)
        after = averaged([mean(m) for m in treated])
        change = self._interval(after - first)
        versus = self._interval(after - averaged([mean(m) for m in control]))
        best4 = self._interval(averaged([best(m, 4) for m in treated]) - best(before, 4))
        retry = self._interval(after - mean(retried))
        given_before = solved_given_formed(successes(before.record), well_formed(before.record))
        given = [solved_given_formed(successes(m.record), well_formed(m.record)) for m in treated]
        given_after = averaged(given)
        given_change = self._interval(given_after - given_before)
        both = ~np.isnan(given_after - given_before)
        curves = [
            [row for row in read(self._run_dir("treated", seed) / "metrics.jsonl") if isinstance(row, StepMetrics)]
            for seed in self._plan.treated
        ]
        if not all(curves):
            raise InfrastructureError("a treated run has no training step")
        each = tuple(float((mean(m) - first).mean()) for m in treated)
        figures = Figures(
            mean_before=float(first.mean()),
            mean_after=float(after.mean()),
            mean_change_low=change.low,
            mean_change_high=change.high,
            mean_change_each=each,
            treated_minus_control=versus.estimate,
            treated_minus_control_low=versus.low,
            control_change=float(np.mean([(mean(m) - first).mean() for m in control])),
            best4_before=float(best(before, 4).mean()),
            best4_after=float(averaged([best(m, 4) for m in treated]).mean()),
            best4_change_low=best4.low,
            best8_before=float(best(before, 8).mean()),
            best8_after=float(averaged([best(m, 8) for m in treated]).mean()),
            solved_given_formed_before=float(given_before[both].mean()),
            solved_given_formed_after=float(given_after[both].mean()),
            solved_given_formed_low=given_change.low,
            well_formed_before=float(well_formed(before.record).mean()),
            well_formed_after=float(np.mean([well_formed(m.record).mean() for m in treated])),
            forced_retry_mean=float(mean(retried).mean()),
            after_minus_forced_retry=retry.estimate,
            after_minus_forced_retry_low=retry.low,
            entropy_before=float(np.mean([row.entropy for rows in curves for row in rows[:5]])),
            entropy_after=float(np.mean([row.entropy for rows in curves for row in rows[-5:]])),
            distinct_before=float(np.mean(before.distinct)),
            distinct_after=float(np.mean([m.distinct for m in treated])),
            temperature=temperature,
            dev_means=dev_means,
            tasks=len(self.tasks),
            modules=len(set(self.modules)),
            attempts=self._job.evaluation.attempts,
            minutes_each=self._job.coordinator.minutes,
            steps_each=tuple(rows[-1].step for rows in curves),
            bars={},
        )
        found = {
            "mean_change_low": change.low >= BARS["mean_change_low"],
            "mean_change_each": min(each) > BARS["mean_change_each"],
            "treated_minus_control_low": versus.low >= BARS["treated_minus_control_low"],
            "best4_change_low": best4.low >= BARS["best4_change_low"],
            "solved_given_formed_low": given_change.low > BARS["solved_given_formed_low"],
        }
        return msgspec.structs.replace(figures, bars={name: bool(held) for name, held in found.items()})


def page(figures: Figures, plan: CheckPlan) -> str:
    """`docs/learning_check.md`."""
    f = figures
    marks = {name: "held" if held else "**missed**" for name, held in f.bars.items()}
    each = ", ".join(f"{value:+.3f}" for value in f.mean_change_each)
    dev = ", ".join(f"T = {name}: {value:.3f}" for name, value in f.dev_means.items())
    return f"""# Learning check

Made by `make learning-check`. {len(plan.treated)} treated and {len(plan.control)} control runs (total rewards permuted within each
group, all else equal), {f.minutes_each:g} minutes of RL each ({", ".join(map(str, f.steps_each))} steps in the treated ones);
{f.tasks} held-out tasks of {f.modules} modules, {f.attempts} attempts before and after, verifier success only, at temperature
{f.temperature:g} on both sides, the best for the starter on dev tasks ({dev}). Intervals: bootstrap over modules, then tasks,
seeds averaged, two-sided 95%.

| figure | before | after | change | 95% bound | bar | |
|---|---|---|---|---|---|---|
| mean success | {f.mean_before:.3f} | {f.mean_after:.3f} | {f.mean_after - f.mean_before:+.3f} | low {f.mean_change_low:+.3f}, high {f.mean_change_high:+.3f} | low >= 0.05 | {marks["mean_change_low"]} |
| each seed | | | {each} | | every one > 0.03 | {marks["mean_change_each"]} |
| treated minus control | | | {f.treated_minus_control:+.3f} | low {f.treated_minus_control_low:+.3f} | low >= 0.05 | {marks["treated_minus_control_low"]} |
| best of 4 | {f.best4_before:.3f} | {f.best4_after:.3f} | {f.best4_after - f.best4_before:+.3f} | low {f.best4_change_low:+.3f} | low >= -0.05 | {marks["best4_change_low"]} |
| best of 8 | {f.best8_before:.3f} | {f.best8_after:.3f} | {f.best8_after - f.best8_before:+.3f} | | reported | |
| P(solved given well-formed) | {f.solved_given_formed_before:.3f} | {f.solved_given_formed_after:.3f} | {f.solved_given_formed_after - f.solved_given_formed_before:+.3f} | low {f.solved_given_formed_low:+.3f} | low > 0 | {marks["solved_given_formed_low"]} |
| well-formed rollouts | {f.well_formed_before:.3f} | {f.well_formed_after:.3f} | {f.well_formed_after - f.well_formed_before:+.3f} | | | |
| entropy per sampled token (training) | {f.entropy_before:.3f} | {f.entropy_after:.3f} | {f.entropy_after - f.entropy_before:+.3f} | | reported | |
| distinct solutions per task | {f.distinct_before:.2f} | {f.distinct_after:.2f} | {f.distinct_after - f.distinct_before:+.2f} | | reported | |

**The habit of trying again.** The starter with a retry forced after every failing run solves {f.forced_retry_mean:.3f}; the trained
policy is {f.after_minus_forced_retry:+.3f} above that (95% low {f.after_minus_forced_retry_low:+.3f}). Of the gain of
{f.mean_after - f.mean_before:+.3f}, {f.forced_retry_mean - f.mean_before:+.3f} is what forced retries alone give. Control runs changed
the mean by {f.control_change:+.3f}.
"""
