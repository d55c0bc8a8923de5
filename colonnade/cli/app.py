"""All commands by name. A new command is one file with one function, and one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from colonnade.cli.ckpt import ckpt
from colonnade.cli.doctor import doctor
from colonnade.cli.new import new
from colonnade.cli.run import ScriptCommand, run
from colonnade.version import __version__


@dataclass(frozen=True)
class Command:
    """A command's function, whose docstring is its help, and how its command line is read."""

    function: Callable[..., Any]
    reader: type[TyperCommand] = TyperCommand


COMMANDS: dict[str, Command] = {
    "run": Command(run, ScriptCommand),
    "doctor": Command(doctor),
    "ckpt": Command(ckpt),
    "new": Command(new),
}


def build_app() -> typer.Typer:
    """Return the command line with every command of the table."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_options)
    for name, command in COMMANDS.items():
        app.command(name, cls=command.reader)(command.function)
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
