"""Reading a command line that ends in a script's own: our options come before its arguments."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

SCRIPT_ARGUMENTS = "colonnade.script_arguments"


class ScriptCommand(TyperCommand):
    """A command whose first word is a script and whose rest, after our options, belongs to that script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the script's own arguments out of our parser; the command finds them in `ctx.meta`."""
        options = {
            name: not getattr(option, "is_flag", False) for option in self.get_params(ctx) for name in _names(option)
        }
        ours, rest = split(args, options)
        ctx.meta[SCRIPT_ARGUMENTS] = tuple(rest)
        _warn_of_near_miss(rest, options)
        return super().parse_args(ctx, ours)


def split(arguments: Sequence[str], options: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Split a command line into ours and the script's.

    `options` says of each of our options whether a value follows it. Ours end at the first word after the
    script that is not one of them, or at `--`; `--help` after the script is the script's.
    """
    ours: list[str] = []
    words = list(arguments)
    has_script = False
    while words:
        word = words[0]
        name = _option_name(word, options)
        if word == "--" and has_script:
            return ours, words[1:]
        if has_script and (name is None or name == "--help"):
            return ours, words
        is_pair = name is not None and word == name and options[name]
        ours += words[: 2 if is_pair else 1]
        words = words[2 if is_pair else 1 :]
        has_script = has_script or not word.startswith("-")
    return ours, []


def _option_name(word: str, options: Mapping[str, bool]) -> str | None:
    """Return which option a word is: `--name`, `--name=value`, `-n` or `-nvalue`."""
    if not word.startswith("-"):
        return None
    long = word.partition("=")[0]
    if long in options:
        return long
    short = word[:2]
    return short if short != "--" and options.get(short) else None


def _names(option: Any) -> list[str]:
    """Return an option's spellings; an argument has none."""
    return [*option.opts, *option.secondary_opts] if option.param_type_name == "option" else []


def _warn_of_near_miss(rest: Sequence[str], options: Mapping[str, bool]) -> None:
    if rest and rest[0].startswith("--"):
        close = difflib.get_close_matches(rest[0].partition("=")[0], options, n=1, cutoff=0.8)
        if close and close[0] != "--help":
            typer.echo(f"colonnade: {rest[0]} goes to the script; did you mean {close[0]}?", err=True)
