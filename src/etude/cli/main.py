"""The `etude` command. Each command imports what it needs when it runs, so that `etude --help` is quick.

Bad input ends with one line on standard error and exit code 2; a stopped run with 130; a broken invariant with 1.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec, TypeVar

import typer

from etude import __version__
from etude.records.errors import BadInput, EtudeError

if TYPE_CHECKING:
    from etude.cli.tree import Config

P = ParamSpec("P")
R = TypeVar("R")

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Train, serve and measure your own coding agent.")
serve_app = typer.Typer(no_args_is_help=True, help="Services that run as their own processes.")
tasks_app = typer.Typer(no_args_is_help=True, help="Make, check and list tasks.")
model_app = typer.Typer(no_args_is_help=True, help="Look at a policy; make the starter policy.")
config_app = typer.Typer(no_args_is_help=True, help="The effective config.")
runs_app = typer.Typer(no_args_is_help=True, help="Look into runs.")
eval_app = typer.Typer(invoke_without_command=True, help="Measure a policy on held-out tasks, or watch it work on one.")
for name, sub in (
    ("eval", eval_app),
    ("serve", serve_app),
    ("tasks", tasks_app),
    ("model", model_app),
    ("config", config_app),
    ("runs", runs_app),
):
    app.add_typer(sub, name=name)

ConfigFiles = Annotated[list[Path], typer.Option("--config", "-c", help="TOML file; later ones win.")]
Overrides = Annotated[list[str], typer.Argument(help="key=value overrides, for example trainer.learning_rate=1e-4")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the run.")]


def _load(files: list[Path], overrides: list[str], base: str = "") -> tuple[Config, dict[str, str]]:
    from etude.cli.tree import HOME, Config
    from etude.records.config import load

    defaults = [HOME / "configs" / base] if base else []
    return load(Config, [*defaults, *files], overrides)


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"etude {__version__}")
        raise typer.Exit()


@config_app.command("show")
def config_show(overrides: Overrides = [], config: ConfigFiles = []) -> None:  # noqa: B006
    """Print every key of the effective config, its value and where the value came from."""
    from etude.records.config import settings

    tree, origins = _load(config, overrides)
    rows = list(settings(tree, origins))
    width = max(len(row.key) for row in rows)
    for row in rows:
        typer.echo(f"{row.key:<{width}}  {row.value!r}  ({row.origin})")


@app.command()
def doctor() -> None:
    """Check what this machine has: rights for pods, compiler, disk, ports. Exit code 2 when something needed is missing."""
    from etude.cli.tree import Config
    from etude.environments.doctor import diagnose

    missing = False
    for check in diagnose(Config().environments.cache):
        typer.echo(
            f"{'ok     ' if check.ok else 'MISSING' if check.needed else 'without'}  {check.name}: {check.detail}"
        )
        if not check.ok:
            missing = missing or check.needed
            typer.echo(f"         {check.fix}")
    if missing:
        raise typer.Exit(2)


@app.command()
def quickstart(
    overrides: Overrides = [],  # noqa: B006
    config: ConfigFiles = [],  # noqa: B006
    seed: Seed = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Measure the starter policy, train it with reinforcement learning for some minutes, measure it again."""
    tree, origins = _load(config, [f"coordinator.seed={seed}", *overrides], base="quickstart.toml")
    from etude.cli.train import run_training

    run_training(tree, origins, "quickstart", measure=True, json_file=json)


@app.command()
def train(
    overrides: Overrides = [],  # noqa: B006
    config: ConfigFiles = [],  # noqa: B006
    seed: Seed = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Train a policy by reinforcement learning as the config says."""
    tree, origins = _load(config, [f"coordinator.seed={seed}", *overrides])
    from etude.cli.train import run_training

    run_training(tree, origins, "train", measure=False, json_file=json)


@eval_app.callback()
def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Option("--model", help="Hugging Face folder of the policy.")] = "",
    task: Annotated[str, typer.Option("--task", help="Task id (or its beginning) or name, with --show.")] = "",
    show: Annotated[bool, typer.Option("--show", help="Show the policy at work on one task.")] = False,
    attempts: Annotated[int, typer.Option("--attempts", help="Attempts at each task.")] = 0,
    tasks: Annotated[int, typer.Option("--tasks", help="Number of tasks.")] = 0,
    split: Annotated[str, typer.Option("--split", help="Task split: held_out, dev or rl.")] = "",
    temperature: Annotated[float, typer.Option("--temperature", help="Sampling temperature.")] = -1.0,
    json: Annotated[Path | None, typer.Option("--json", help="Write the evaluation record to this file.")] = None,
    config: ConfigFiles = [],  # noqa: B006
) -> None:
    """Measure a policy on held-out tasks, or show it at work on one."""
    if context.invoked_subcommand is not None:
        return
    given = {
        "model": f'"{model}"' if model else None,
        "evaluation.attempts": attempts or None,
        "evaluation.tasks": tasks or None,
        "evaluation.split": f'"{split}"' if split else None,
        "evaluation.temperature": temperature if temperature >= 0 else None,
    }
    overrides = [f"{key}={value}" for key, value in given.items() if value is not None]
    if 0 < attempts < 4:
        overrides.append(f"evaluation.best_of={attempts}")
    tree, _ = _load(config, overrides, base="quickstart.toml")
    from etude.cli import evaluate as commands

    if show or task:
        commands.show(tree, task, max(1, attempts))
    else:
        commands.measure(tree, json)


@eval_app.command("learning-check")
def learning_check(
    overrides: Overrides = [],  # noqa: B006
    folder: Annotated[
        Path, typer.Option("--folder", help="Where runs and evaluations are kept; goes on from there.")
    ] = Path("runs/learning-check"),
    docs: Annotated[Path, typer.Option("--docs", help="Where the report is written.")] = Path("docs"),
) -> None:
    """Check that training teaches repair: treated and control runs, measured on many held-out tasks. Resumable."""
    from etude.cli.tree import HOME

    tree, _ = _load([HOME / "configs" / "learning_check.toml"], overrides, base="quickstart.toml")
    from etude.cli.train import run_learning_check

    run_learning_check(tree, folder, docs)


@serve_app.command("inference", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve_inference(context: typer.Context) -> None:
    """Serve a policy: every field of the `inference` config is an option (--model DIR --port N --store URL --run PREFIX)."""
    from etude.inference.server import main as serve

    raise typer.Exit(serve(context.args))


@runs_app.command("list")
def runs_list(config: ConfigFiles = []) -> None:  # noqa: B006
    """Runs, oldest first, with what they found."""
    import msgspec

    from etude.cli.tree import located
    from etude.coordinator.summary import Summary

    tree, _ = _load(config, [])
    for folder in sorted(path for path in located(tree.runs).glob("*") if (path / "config.json").exists()):
        summary = folder / "summary.json"
        facts = msgspec.json.decode(summary.read_bytes(), type=Summary).facts if summary.exists() else {}
        typer.echo(f"{folder.name}  " + ("  ".join(f"{k}: {v}" for k, v in facts.items()) or "not finished"))


@runs_app.command("report")
def runs_report(run: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """Write a run's report.html anew."""
    from etude.web.report import write_report

    typer.echo(str(write_report(run)))


@tasks_app.command("make")
def tasks_make(
    repo: Annotated[Path | None, typer.Option("--repo", help="Your own project, with pytest tests.")] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Archive to write, or with --repo a folder of task folders.")
    ] = Path("data/tasks.tar.zst"),
    limit: Annotated[int, typer.Option("--limit", help="Most tasks made with --repo.")] = 50,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the choice with --repo.")] = 0,
) -> None:
    """Make repair tasks: from the pinned sources, or from your own project."""
    if repo is None:
        from etude.tasks.make import make_archive

        counts = make_archive(Path(".cache/corpus"), out, out.parent / "NOTICE-tasks.md", progress=typer.echo)
        typer.echo(f"{out}: " + ", ".join(f"{split} {count}" for split, count in counts.items()))
        return
    from etude.tasks.harbor import write_folder
    from etude.tasks.project import make_from_project

    folder = out if out != Path("data/tasks.tar.zst") else Path("tasks")
    tasks = make_from_project(repo, limit=limit, seed=seed, progress=typer.echo)
    for task in tasks:
        write_folder(task, folder / task.name)
    typer.echo(f"{len(tasks)} tasks in {folder}")


@tasks_app.command("check")
def tasks_check(
    path: Annotated[Path | None, typer.Argument(help="Folder of tasks or archive.")] = None,
    corpus: Annotated[
        Path, typer.Option("--corpus", help="Corpora to prove the splits against, when they exist.")
    ] = Path(".cache/corpus"),
) -> None:
    """Check tasks: the solution passes, the untouched repository fails, hidden checks bite, the splits are disjoint."""
    from etude.cli.tree import Config, located
    from etude.environments.image import ensure_image
    from etude.tasks.archive import TaskSet
    from etude.tasks.check import check, require_clean

    place = located(str(path) if path is not None else Config().tasks)
    tasks = list(TaskSet.open(place))
    report = check(
        tasks,
        corpus_folder=corpus if corpus.exists() else None,
        image_modules=ensure_image(Config().environments.cache).modules(),
        progress=typer.echo,
    )
    for name, counts in (("tasks", report.by_split), ("modules", report.modules), ("operators", report.by_operator)):
        typer.echo(f"{name}: " + ", ".join(f"{key} {count}" for key, count in counts.items()))
    require_clean(report, str(place))
    typer.echo(
        f"{report.tasks} tasks: every check holds" + ("" if corpus.exists() else " (no corpora here to prove against)")
    )


@tasks_app.command("list")
def tasks_list(
    path: Annotated[Path | None, typer.Argument(help="Folder of tasks or archive.")] = None,
    split: Annotated[str, typer.Option("--split", help="Only this split.")] = "",
) -> None:
    """List tasks: id, split, operator, name."""
    from etude.cli.tree import Config, located
    from etude.tasks.archive import TaskSet

    for entry in TaskSet.open(located(str(path) if path is not None else Config().tasks)).entries:
        if not split or entry.split == split:
            typer.echo(f"{entry.id[:12]}  {entry.split:<9} {entry.operator:<18} {entry.name}")


@model_app.command("show")
def model_show(model: Annotated[str, typer.Argument(help="Hugging Face folder.")] = "data/starter") -> None:
    """A policy's architecture and sizes."""
    from etude.cli.tree import located
    from etude.model.checkpoint import load_pretrained, read_config

    folder = located(model)
    for key, value in read_config(folder).to_hf().items():
        typer.echo(f"{key:<28} {value}")
    total = sum(parameter.numel() for parameter in load_pretrained(folder).parameters())
    typer.echo(f"{'parameters':<28} {total:,}")


@model_app.command("starter")
def model_starter(
    minutes: Annotated[float, typer.Option("--minutes", help="Minutes of pretraining, its decay included.")] = 0.0,
    threads: Annotated[int, typer.Option("--threads", help="Threads of the training stages.")] = 1,
    install: Annotated[bool, typer.Option("--install", help="Copy the result to data/starter.")] = False,
) -> None:
    """Make the starter policy from source code: corpus, tokenizer, pretraining, demonstrations, fine-tuning, gate. Resumable."""
    tree, _ = _load([], [], base="quickstart.toml")
    from etude.cli.train import make_the_starter

    make_the_starter(tree, minutes, threads, install)


def _reported(command: Callable[P, R]) -> Callable[P, R]:
    """Turns expected errors into one line and an exit code."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except BadInput as error:
            typer.echo(f"etude: {error}", err=True)
            sys.exit(2)
        except EtudeError as error:
            typer.echo(f"etude: {type(error).__name__}: {error}", err=True)
            sys.exit(1)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            typer.echo(
                f"etude: {error.filename or 'disk'}: space is used up; expected room to write ({error})", err=True
            )
            sys.exit(2)
        except KeyboardInterrupt:
            typer.echo("etude: stopped", err=True)
            sys.exit(130)

    return run


@_reported
def main() -> None:
    """Entry point of the `etude` command."""
    app()


if __name__ == "__main__":
    main()
