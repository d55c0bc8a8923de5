"""`colonnade run`: start a script on several ranks of this machine, or as one node of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from colonnade.launching.launch_job import LaunchJob, checked


def run(
    ctx: typer.Context,
    script: Annotated[str, typer.Argument(help="Script to run, or a module with -m.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What follows goes to the script.")] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", "-n", min=1, help="Ranks on this machine; without it one per GPU, or one.")
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
    max_restarts: Annotated[int, typer.Option(min=0, help="Start all ranks again after a failure, this often.")] = 0,
    grace: Annotated[
        int,
        typer.Option(min=0, max=86_400, help="Seconds that ranks have after SIGTERM to finish their step and save."),
    ] = 30,
    nnodes: Annotated[int, typer.Option(min=1, help="Machines in the job; run this command on each.")] = 1,
    node_rank: Annotated[
        int | None, typer.Option(help="This machine's place, 0 to nnodes-1; without it they agree.")
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of one machine, where all meet. Needed for several machines."),
    ] = None,
) -> None:
    """Run SCRIPT on several ranks. Options of this command come before the script's own arguments.

    torchrun's spellings are taken too: --nproc_per_node, --max_restarts, --rdzv_endpoint.

    Rank 0 prints as if it were alone; lines of the others begin with their rank.
    When a rank fails all are ended, and its traceback is shown last.
    The exit code is that of the rank, or 128 + the signal that killed it; 75 after a SIGTERM that all ranks
    obeyed in order (a Trainer finishes its step and saves). Ctrl-C ends it at once, and says what was saved last.
    """
    _warn_of_misplaced_option(ctx, arguments or ())
    job = checked(
        LaunchJob(
            target=script,
            is_module=module,
            arguments=tuple(arguments or ()),
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
    from colonnade.launching.launcher import launch

    raise typer.Exit(launch(job))


def our_name(option: str) -> str:
    """torchrun's spelling of an option as ours: `nproc_per_node` is `nproc`, `max_restarts` is `max-restarts`."""
    name = option.replace("_", "-")
    return "nproc" if name == "nproc-per-node" else name


def _warn_of_misplaced_option(ctx: typer.Context, arguments: Sequence[str]) -> None:
    own = {name for option in ctx.command.params for name in option.opts if name.startswith("--")}
    if arguments and f"--{our_name(arguments[0].partition('=')[0].removeprefix('--'))}" in own:
        typer.echo(f"colonnade: {arguments[0]} goes to the script; options of `run` come before it", err=True)
