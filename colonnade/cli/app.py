"""The table of all commands. A command is one function in its own file and one line of the table here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from colonnade.cli.ckpt import ckpt
from colonnade.cli.config_command import config
from colonnade.cli.doctor import doctor
from colonnade.cli.explain_command import explain
from colonnade.cli.new import new
from colonnade.cli.plan_command import plan
from colonnade.cli.report_command import report
from colonnade.cli.run_command import demo, option_name, run
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
"""The docstring of each function is the help text of its command."""


def build_app() -> typer.Typer:
    """Build the command line with all commands of the table."""
    with_help = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, context_settings=with_help)
    app.callback(cls=_Commands)(_options)
    for name, function in COMMANDS.items():
        # Everything after the script of `run` and `verify` belongs to the script, options too.
        settings = {"allow_interspersed_args": function not in (run, verify), "token_normalize_func": option_name}
        command = app.command(
            name, cls=_Command, help=_paragraphs(function), context_settings={**with_help, **settings}
        )
        command(_with_local_paths(function))
    return app


def _paragraphs(function: Callable[..., Any]) -> str:
    """The docstring with one line for each paragraph: typer would keep the line breaks of the source."""
    text = inspect.getdoc(function) or ""
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in text.split("\n\n"))


def _with_local_paths(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the command reject URLs in all its path arguments and options before it does anything."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name, value in kwargs.items():
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, Path):
                    local_path(item, f"the path given as {name!r}")
        return function(*args, **kwargs)

    return checked


class _Command(TyperCommand):
    """A command with plain metavars in its usage and help."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _with_plain_metavars(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        return ["[OPTIONS]", *(param.metavar if param.required else f"[{param.metavar}]" for param in arguments)]


class _Commands(TyperGroup):
    """The group of all commands, with plain metavars in its help."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _with_plain_metavars(super().get_params(ctx))


def _with_plain_metavars(params: list[Any]) -> list[Any]:
    """Show arguments as SCRIPT instead of {script} <str>, and no <bool> after a switch."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif param.param_type_name == "argument":
            param.metavar = param.name.upper() + ("..." if param.nargs == -1 else "")
            # Typer prints the type after the name of an argument; only a list of choices says more than the name.
            kind = getattr(param, "type_descriptor", None)  # of newer typers
            if kind is not None and not kind.is_choice:
                param.display_type_rich = lambda ctx: None
    return params


def _show_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"colonnade {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit."),
    ] = False,
) -> None:
    """Multi-dimensional parallel training for PyTorch, checked against a single-process run."""
