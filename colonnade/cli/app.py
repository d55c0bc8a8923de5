"""All commands by name. A new command is one file with one function, and one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from colonnade.cli.ckpt import ckpt
from colonnade.cli.doctor import doctor
from colonnade.cli.explain import explain
from colonnade.cli.new import new
from colonnade.cli.plan import plan
from colonnade.cli.report import report
from colonnade.cli.run import run
from colonnade.cli.verify import verify
from colonnade.version import __version__

COMMANDS: dict[str, Callable[..., Any]] = {
    "run": run,
    "doctor": doctor,
    "ckpt": ckpt,
    "new": new,
    "verify": verify,
    "explain": explain,
    "plan": plan,
    "report": report,
}
"""Each is a function whose docstring is its help."""


def build_app() -> typer.Typer:
    """Return the command line with every command of the table."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_options)
    for name, function in COMMANDS.items():
        # What follows a script is the script's own.
        app.command(name, context_settings={"allow_interspersed_args": function not in (run, verify)})(function)
    return app


def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=lambda asked: _show_version(asked))
    ] = False,
) -> None:
    """Parallel training on PyTorch whose gradients are proven equal to one process."""


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"colonnade {__version__}")
        raise typer.Exit
