"""The `etude` command. Each command imports what it needs when it runs, so that `etude --help` is quick.

Bad input ends with one line on standard error and exit code 2; a stopped run with 130; a broken invariant with 1.
"""

from __future__ import annotations

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
    from rich.console import Console
    from rich.table import Table

    from etude.records.config import settings

    tree, origins = _load(config, overrides)
    table = Table("key", "value", "from", box=None)
    for row in settings(tree, origins):
        table.add_row(row.key, repr(row.value), row.origin)
    Console(soft_wrap=True).print(table)


@app.command()
def doctor() -> None:
    """Check what this machine has: rights for pods, compiler, disk, ports. Exit code 2 when something needed is missing."""
    from etude.environments.doctor import check_machine

    missing = False
    for check in check_machine():
        typer.echo(f"{'ok     ' if check.ok else 'MISSING'}  {check.name}: {check.detail}")
        if not check.ok:
            missing = True
            typer.echo(f"         {check.fix}")
    if missing:
        raise typer.Exit(2)


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
