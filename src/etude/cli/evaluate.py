"""`etude eval`: measure a policy on tasks, or show it at work on one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import typer

from etude.agent.loop import AgentOptions, run_rollout
from etude.agent.trajectory import TextWatcher, ending_text, opening_text
from etude.bench.evaluate import choose_tasks, evaluate, successes, well_formed
from etude.bench.metrics import best_of_k_each, mean_interval
from etude.chat.tokenizer import Tokenizer
from etude.cli.train import Lines, make_job
from etude.cli.tree import Config, located
from etude.coordinator.actors import open_pods
from etude.coordinator.engine_process import EngineProcess
from etude.coordinator.seeds import rollout_seed
from etude.coordinator.summary import write_json
from etude.inference.client import HttpEngineClient
from etude.records.errors import BadInput
from etude.records.task import Split, Task
from etude.tasks.archive import TaskSet


def find_task(tasks: TaskSet, wanted: str, split: Split) -> Task:
    """The task whose id or name starts with `wanted`; the first of the split when it is empty."""
    if not wanted:
        return next(iter(tasks.split(split)))
    every = [task for each in Split for task in tasks.split(each)]
    found = [task for task in every if task.id.startswith(wanted) or task.name == wanted]
    if not found:
        raise BadInput("tasks", "task", wanted, "an id (or its beginning) or a name that `etude tasks list` prints")
    return found[0]


async def _show(config: Config, task: Task, attempts: int) -> None:
    model = located(config.model).resolve()
    tokenizer = Tokenizer.load(model)
    pods = await open_pods(config.environments)
    try:
        inference = config.inference.model_copy(update={"model": str(model)})
        process = await EngineProcess.start(inference, located(config.runs) / "logs" / "engine.log")
        engine = HttpEngineClient(process.url)
        try:
            for attempt in range(attempts):
                typer.echo(opening_text(task))
                rollout = await run_rollout(
                    task,
                    attempt=attempt,
                    seed=rollout_seed(config.evaluation.seed, task.id, attempt),
                    engine=engine,
                    pods=pods,
                    tokenizer=tokenizer,
                    options=AgentOptions(
                        config=config.agent.model_copy(update={"temperature": config.evaluation.temperature}),
                        rl=config.rl,
                        watcher=TextWatcher(typer.echo),
                    ),
                )
                typer.echo(ending_text(rollout))
        finally:
            await engine.aclose()
            await process.stop()
    finally:
        await pods.aclose()


def show(config: Config, wanted: str, attempts: int) -> None:
    """Runs the policy on one task and prints every action and result as it happens."""
    tasks = TaskSet.open(located(config.tasks))
    asyncio.run(_show(config, find_task(tasks, wanted, Split(config.evaluation.split)), attempts))


async def _measure(config: Config, tasks: list[Task], json_file: Path | None) -> None:
    watch = Lines(config)
    async with make_job(config, located(config.runs), measure=False).fleet() as fleet:
        record = await evaluate(
            fleet.workers,
            tasks,
            attempts=config.evaluation.attempts,
            temperature=config.evaluation.temperature,
            seed=config.evaluation.seed,
            weights_digest=fleet.engine.digest,
            policy_version=0,
            progress=watch.evaluated,
        )
    modules = [task.module for task in tasks]
    wins = successes(record)
    mean = mean_interval(wins.mean(axis=1), modules)
    best = mean_interval(best_of_k_each(wins, config.evaluation.best_of), modules)
    typer.echo(f"mean success       {mean.estimate:.3f}  (95%: {mean.low:.3f} to {mean.high:.3f})")
    typer.echo(
        f"best of {config.evaluation.best_of:<3}        {best.estimate:.3f}  (95%: {best.low:.3f} to {best.high:.3f})"
    )
    typer.echo(f"well-formed        {well_formed(record).mean():.3f}")
    typer.echo(f"{len(tasks)} tasks of {len(set(modules))} modules, {config.evaluation.attempts} attempts each")
    if json_file is not None:
        write_json(json_file, record)


def measure(config: Config, json_file: Path | None) -> None:
    """Evaluates the policy on the config's split and prints mean, best-of-K and well-formedness with intervals."""
    task_set = TaskSet.open(located(config.tasks))
    tasks = choose_tasks(
        task_set.split(Split(config.evaluation.split)),
        config.evaluation.tasks,
        config.evaluation.per_module,
        config.evaluation.seed,
    )
    asyncio.run(_measure(config, tasks, json_file))
