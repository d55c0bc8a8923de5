"""All commands by name. A command is one function, in a file of its own, and one line in the table here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from colonnade.cli.ckpt import ckpt
from colonnade.cli.config_command import config
from colonnade.cli.demo import demo
from colonnade.cli.doctor import doctor
from colonnade.cli.explain_command import explain
from colonnade.cli.new import new
from colonnade.cli.plan_command import plan
from colonnade.cli.report_command import report
from colonnade.cli.run_command import our_name, run
from colonnade.cli.verify_command import verify
from colonnade.paths import local_path
from colonnade.version import __version__

COMMANDS: dict[str, Callable[..., Any]] = {
    "demo": demo,
    "run": run,
    "doctor": doctor,
    "ckpt": ckpt,
    "new": new,
    "verify": verify,
    "explain": explain,
    "plan": plan,
    "report": report,
    "config": config,
}
"""Each is a function whose docstring is its help."""


def build_app() -> typer.Typer:
    """Return the command line with every command of the table."""
    helped = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, context_settings=helped)
    app.callback(cls=_Commands)(_options)
    for name, function in COMMANDS.items():
        # What follows a script is the script's own.
        settings = {"allow_interspersed_args": function not in (run, verify), "token_normalize_func": our_name}
        app.command(name, cls=_Command, context_settings={**helped, **settings})(_with_local_paths(function))
    return app


def _with_local_paths(function: Callable[..., Any]) -> Callable[..., Any]:
    """The command, which refuses URLs in every argument and option that is a path, before it does anything."""

    @functools.wraps(function)
    def checked(*given: Any, **named: Any) -> Any:
        for name, value in named.items():
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, Path):
                    local_path(each, f"the path given as {name!r}")
        return function(*given, **named)

    return checked


class _Command(TyperCommand):
    """A command whose help does not say of a switch that it is a <bool>."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain_switches(super().get_params(ctx))


class _Commands(TyperGroup):
    """The group of all commands, with the same change to its help."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain_switches(super().get_params(ctx))


def _plain_switches(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"colonnade {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit."),
    ] = False,
) -> None:
    """Parallel training on PyTorch whose gradients are proven equal to one process."""
