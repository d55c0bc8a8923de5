"""`colonnade run`: start a script on several ranks of this machine, or as one node of several."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from colonnade.cli.job import Job, checked

_SCRIPT_ARGUMENTS = "colonnade.script_arguments"


def run(
    ctx: typer.Context,
    script: Annotated[str, typer.Argument(help="Script to run, or a module with -m; its arguments follow.")],
    nproc: Annotated[
        int | None, typer.Option("--nproc", "-n", help="Ranks on this machine; without it one per GPU, or one.")
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT names a module.")] = False,
    as_colossalai: Annotated[
        bool, typer.Option("--as-colossalai", help="Let `import colossalai` find Colonnade.")
    ] = False,
    log_dir: Annotated[
        Path | None,
        typer.Option("--log-dir", help="Keep each rank's output here as rank<N>.stdout and .stderr."),
    ] = None,
    no_prefix: Annotated[bool, typer.Option("--no-prefix", help="Do not mark lines with their rank.")] = False,
    prefix_all: Annotated[bool, typer.Option("--prefix-all", help="Mark the lines of rank 0 too.")] = False,
    max_restarts: Annotated[int, typer.Option(help="Start all ranks again after a failure, this often.")] = 0,
    grace: Annotated[
        int, typer.Option(help="Seconds that ranks have after SIGTERM to finish their step and save.")
    ] = 30,
    nnodes: Annotated[int, typer.Option(help="Machines in the job; run this command on each.")] = 1,
    node_rank: Annotated[
        int | None, typer.Option(help="This machine's place, 0 to nnodes-1; without it they agree.")
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of one machine, where all meet. Needed for several machines."),
    ] = None,
) -> None:
    """Run SCRIPT on several ranks. Options of this command come before the script's own arguments.

    Rank 0 prints as if it were alone; lines of the others begin with their rank.
    When a rank fails all are ended, and its traceback is shown last.
    The exit code is that of the rank, or 128 + the signal that killed it; 75 after a SIGTERM that all ranks
    obeyed in order (a Trainer finishes its step and saves).
    """
    job = checked(
        Job(
            target=script,
            is_module=module,
            arguments=ctx.meta[_SCRIPT_ARGUMENTS],
            nproc=nproc,
            as_colossalai=as_colossalai,
            log_dir=log_dir,
            prefix="none" if no_prefix else "all" if prefix_all else "others",
            max_restarts=max_restarts,
            grace=grace,
            nnodes=nnodes,
            node_rank=node_rank,
            endpoint=rdzv_endpoint,
        )
    )
    from colonnade.cli.launcher import launch

    raise typer.Exit(launch(job))


class ScriptCommand(TyperCommand):
    """A command whose first word is a script and whose rest, after our options, belongs to that script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the script's own arguments out of our parser; the command finds them in `ctx.meta`."""
        options = {
            name: not getattr(option, "is_flag", False) for option in self.get_params(ctx) for name in _names(option)
        }
        ours, rest = split(args, options)
        ctx.meta[_SCRIPT_ARGUMENTS] = tuple(rest)
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
