"""`etude quickstart` and `etude train`: compose a job from the config, show its progress, write its report."""

from __future__ import annotations

import asyncio
import datetime
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from etude.bench.learning_check import CheckPlan, LearningCheck, page
from etude.bench.quickstart import Job, Result, Watch, prepare, run_job
from etude.bench.starter import gate, make_policy
from etude.cli.tree import HOME, Config, located
from etude.coordinator.metrics import ProbeMetrics, Row, StepMetrics
from etude.coordinator.summary import write_json
from etude.pretrain.config import PretrainConfig
from etude.records.errors import BadInput
from etude.web.report import write_report

if TYPE_CHECKING:
    from etude.coordinator.run import Progress


T = TypeVar("T")


class Lines(Watch):
    """Progress as lines: readable in a terminal, in a file and over a slow connection."""

    def __init__(self, config: Config) -> None:
        self._config, self._shown = config, 0

    def stage(self, name: str) -> None:
        """See `Watch.stage`."""
        typer.echo(f"[{datetime.datetime.now():%H:%M:%S}] {name}")

    def evaluated(self, done: int, total: int, mean: float) -> None:
        """See `Watch.evaluated`."""
        if done == total or done * 8 // total > self._shown:
            self._shown = done * 8 // total % 8
            typer.echo(f"           {done}/{total} attempts, {mean:.1%} solved")

    def row(self, row: Row, progress: Progress) -> None:
        """See `Watch.row`."""
        if isinstance(row, ProbeMetrics):
            typer.echo(
                f"  held-out probe at step {row.step}: mean {row.mean:.1%}, best of {row.attempts} {row.best_of_k:.1%}"
            )
        elif isinstance(row, StepMetrics):
            budget = f"{row.time_s / 60:.1f}" + (
                f"/{self._config.coordinator.minutes:g} min" if self._config.coordinator.minutes else " min"
            )
            typer.echo(
                f"  step {row.step:4d}  {budget}  solved {row.success_mean:.1%}  best of {row.k} {row.best_of_k:.1%}  "
                f"kl {row.kl:.4f}  entropy {row.entropy:.3f}  stale {row.staleness_mean:.1f}  "
                f"{row.rollouts_per_minute:.0f} rollouts/min  step {row.step_s:.1f}s wait {row.wait_s:.1f}s"
                + (f"  void {row.groups_void}" if row.groups_void else "")
            )
            if row.alarm:
                typer.echo(f"  ALARM {row.alarm}", err=True)


def new_run_dir(runs: Path, name: str) -> Path:
    """A folder of its own for a run; `name` is part of it."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for extra in ("", *(f"-{index}" for index in range(1, 100))):
        folder = runs / f"{stamp}-{name}{extra}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise BadInput(
                str(folder), "runs", str(runs), f"a folder that can be written ({error.strerror})"
            ) from error
        return folder
    raise BadInput(str(runs), "runs", name, "a free run name")


def make_job(config: Config, run_dir: Path, *, measure: bool) -> Job:
    """The job that a config describes."""
    return Job(
        model=located(config.model).resolve(),
        tasks=located(config.tasks).resolve(),
        run_dir=run_dir,
        coordinator=config.coordinator,
        rl=config.rl,
        trainer=config.trainer,
        agent=config.agent,
        inference=config.inference,
        environments=config.environments,
        weightsync=config.weightsync,
        evaluation=config.evaluation,
        measure=measure,
    )


async def _until_signal(work: Callable[[asyncio.Event], Awaitable[T]]) -> T:
    """Runs `work`; the first Ctrl-C or SIGTERM sets its event, a second one cuts it off."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None

    def asked() -> None:
        if stop.is_set():
            main.cancel()
        else:
            typer.echo("ending: finishing the step at hand (again to cut off)", err=True)
            stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked)
    try:
        return await work(stop)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def run_training(config: Config, origins: dict[str, str], name: str, *, measure: bool, json_file: Path | None) -> None:
    """Runs a job with progress, writes its report and, when asked, its figures to `json_file`."""
    runs = located(config.runs)
    prepare(make_job(config, runs, measure=measure))
    run_dir = new_run_dir(runs, name)
    write_json(run_dir / "config.json", config.model_dump(mode="json"))
    write_json(run_dir / "config_origins.json", origins)
    typer.echo(f"run folder: {run_dir}")
    try:
        job, watch = make_job(config, run_dir, measure=measure), Lines(config)
        result = asyncio.run(_until_signal(lambda stop: run_job(job, watch, stop)))
    except asyncio.CancelledError:
        typer.echo(f"cut off; what was finished is in {run_dir}", err=True)
        sys.exit(130)
    if json_file is not None:
        write_json(json_file, result)
    report = write_report(run_dir)
    _say_result(result, run_dir, report)
    if result.ended.startswith("stopped"):
        sys.exit(130)


def run_learning_check(config: Config, folder: Path, docs: Path) -> None:
    """Goes on with the learning check in `folder`; writes its report to `docs` when all parts are there."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = CheckPlan()
    check = LearningCheck(make_job(config, folder, measure=False), folder.resolve(), plan, Lines(config))
    figures = asyncio.run(_until_signal(check.run))
    if figures is None:
        typer.echo(f"stopped; what was finished is in {folder} and is not done again", err=True)
        sys.exit(130)
    docs.mkdir(parents=True, exist_ok=True)
    write_json(docs / "learning_check.json", figures)
    (docs / "learning_check.md").write_text(page(figures, plan), encoding="utf-8")
    typer.echo(page(figures, plan))
    if not all(figures.bars.values()):
        sys.exit(1)


def make_the_starter(config: Config, minutes: float, threads: int, install: bool) -> None:
    """All stages of the starter policy, then its gate; exit code 1 when the gate is missed."""
    recipe = PretrainConfig(threads=threads)
    if minutes > 0:
        phase = recipe.pretrain.model_copy(update={"budget_s": 60.0 * minutes})
        recipe = recipe.model_copy(update={"pretrain": phase})
    model = make_policy(recipe, config.environments, typer.echo)
    job = make_job(config.model_copy(update={"model": str(model)}), Path(recipe.folder), measure=False)
    passed = asyncio.run(gate(job, typer.echo))
    if install:
        target = HOME / "data" / "starter"
        shutil.copytree(model, target, dirs_exist_ok=True)
        typer.echo(f"installed in {target}")
    if not passed:
        sys.exit(1)


def _say_result(result: Result, run_dir: Path, report: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if result.mean_before is not None and result.mean_after is not None:
        table = Table("held-out tasks", "before", "after", "change", "95% interval", box=None)
        low, high = result.mean_change_low, result.mean_change_high
        interval = "" if low is None or high is None else f"{low:+.3f} to {high:+.3f}"
        if low is not None and high is not None and low <= 0 <= high:
            interval += "  (not resolved in this short run)"
        rows = (
            ("mean success", result.mean_before, result.mean_after, interval),
            ("best of 4", result.best4_before, result.best4_after, ""),
            ("well-formed", result.well_formed_before, result.well_formed_after, ""),
        )
        for label, before, after, note in rows:
            if before is not None and after is not None:
                table.add_row(label, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}", note)
        console.print(table)
    typer.echo(
        f"{result.steps} steps, {result.groups_trained} groups trained, {result.groups_void} void, "
        f"{result.seconds / 60:.1f} minutes (ended by: {result.ended})"
    )
    typer.echo(f"report: {report}")
    if (run_dir / "policy").exists():
        typer.echo(f"trained policy: {run_dir / 'policy'}")
        typer.echo(f"watch it work:  etude eval --model {run_dir / 'policy'} --show")
