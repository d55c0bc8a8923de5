"""The page of the command line, from the commands themselves."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from colonnade.cli.app import build_app


def markdown() -> str:
    """A section for each command: what it does, how it is called, its arguments and options."""
    group = typer.main.get_command(build_app())
    return "\n".join(line for name, command in group.commands.items() for line in _section(name, command)) + "\n"


def _section(name: str, command: Any) -> list[str]:
    context = type(command).context_class(command, info_name=f"colonnade {name}")
    lines = [f"## colonnade {name}", "", inspect.cleandoc(command.help or ""), ""]
    usage = " ".join(command.collect_usage_pieces(context))
    lines += ["```text", f"colonnade {name} {usage}".rstrip(), "```", ""]
    rows = [_row(parameter, context) for parameter in command.params if parameter.get_help_record(context)]
    return [*lines, "| option or argument | means |", "|---|---|", *rows, ""] if rows else lines


def _row(parameter: Any, context: Any) -> str:
    name, said = parameter.get_help_record(context)
    shown = name.replace(" <str>", " TEXT").replace(" <int range>", " N").replace(" <int>", " N").replace("|", "\\|")
    return f"| `{shown}` | {_cell(said)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[")
