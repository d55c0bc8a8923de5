"""`colonnade run` and `colonnade demo`: a script on several ranks of this machine, or as one node of a multi-node job.

The demo is a script too: it trains a small GPT, with checkpoints, log and HTML report.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from colonnade.errors import ColonnadeError, LaunchError
from colonnade.launching.launch_job import LaunchJob, checked


def run(
    ctx: typer.Context,
    script: Annotated[str, typer.Argument(help="Script to run; with -m, a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc", "-n", min=1, metavar="N", help="Ranks on this machine. Default: one per GPU, or one on a CPU."
        ),
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module.")] = False,
    as_colossalai: Annotated[
        bool, typer.Option("--as-colossalai", help="Make `import colossalai` import Colonnade.")
    ] = False,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            "--log-dir", metavar="FOLDER", help="Write the output of each rank to rank<N>.stdout and .stderr here."
        ),
    ] = None,
    no_prefix: Annotated[bool, typer.Option("--no-prefix", help="Do not prefix output lines with the rank.")] = False,
    prefix_all: Annotated[bool, typer.Option("--prefix-all", help="Prefix the output lines of rank 0 too.")] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="Restart all ranks after a failure, at most N times.")
    ] = 0,
    grace: Annotated[
        int,
        typer.Option(
            min=0,
            max=86_400,
            metavar="SECONDS",
            help="Time that ranks have after SIGTERM to finish their step and save.",
        ),
    ] = 30,
    nnodes: Annotated[int, typer.Option(min=1, metavar="N", help="Machines of the job; run this command on each.")] = 1,
    node_rank: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of this machine, 0 to nnodes-1. Default: assigned automatically."),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address of one machine of the job. Required with --nnodes > 1."),
    ] = None,
) -> None:
    """Run SCRIPT on several ranks.

    Options of this command come before SCRIPT; everything after SCRIPT is passed to it. The option names of torchrun work
    too: --nproc_per_node, --max_restarts, --rdzv_endpoint.

    Lines of rank 0 are printed unchanged; lines of other ranks start with their rank. If a rank fails, all ranks are
    stopped and its traceback is printed last. Ctrl-C stops all ranks at once and prints the newest checkpoint.

    Exit code: that of the failed rank, or 128 + the number of the signal that killed it; 75 if all ranks stopped in order
    after SIGTERM (a Trainer finishes its step and saves).
    """
    own = {name for option in ctx.command.params for name in option.opts if name.startswith("--")}
    if arguments and f"--{option_name(arguments[0].partition('=')[0].removeprefix('--'))}" in own:
        typer.echo(f"colonnade: {arguments[0]} is passed to the script; options of `run` come before SCRIPT", err=True)
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


def option_name(option: str) -> str:
    """Return the option name of this command for a torchrun spelling, such as `nproc` for `nproc_per_node`."""
    name = option.replace("_", "-")
    return "nproc" if name == "nproc-per-node" else name


def demo(
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FOLDER", help="Folder for checkpoints, log and HTML report."),
    ] = Path("colonnade-demo"),
    nproc: Annotated[int, typer.Option("--nproc", "-n", min=2, metavar="N", help="Ranks, an even number.")] = 4,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Steps to train. Default: 200.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the newest checkpoint in the folder.")] = False,
    copy: Annotated[
        Path | None,
        typer.Option(
            "--copy", metavar="FOLDER", help="Copy the script of the demo into this new folder; do not train."
        ),
    ] = None,
) -> None:
    """Train a small GPT on 4 ranks of this machine in about a minute.

    The model trains on data 2 x pipeline 2, with tied embeddings and gradient clipping. No network is needed: the training
    text is Python's own reference. The run writes checkpoints, a log, an HTML report and one weight file for plain torch.
    """
    script = demo_script()
    if copy is not None:
        _copy(script.parent, copy)
        return
    if nproc % 2:
        raise LaunchError(
            f"--nproc is {nproc}, but the demo has two pipeline stages and needs an even number of ranks. Give "
            f"{nproc - 1} or {nproc + 1}.",
            code="C022",
        )
    options = ["--output", str(output), *([] if resume else ["--fresh"]), *(["--steps", str(steps)] if steps else [])]
    job = checked(LaunchJob(target=str(script), nproc=nproc, arguments=tuple(options)))
    from colonnade.launching.launcher import launch

    status = launch(job)
    if status == 0:
        typer.echo(f"checkpoints: colonnade ckpt ls {output}")
        typer.echo(
            f"resume:      colonnade demo -o {output} --resume --steps 400 (try Ctrl-C, then the same command again)"
        )
        typer.echo("your copy:   colonnade demo --copy my-gpt")
    raise typer.Exit(status)


def _copy(source: Path, folder: Path) -> None:
    """Copy the files of the demo into a new folder."""
    if folder.exists():
        raise ColonnadeError(
            f"{folder} already exists, and an existing folder is never overwritten. Give the name of a new folder."
        )
    folder.mkdir(parents=True)
    for file in sorted(source.glob("*.py")):
        shutil.copyfile(file, folder / file.name)
    typer.echo(f"wrote {folder}; run it: colonnade run --nproc 4 {folder / 'train.py'}")


def demo_script() -> Path:
    """Return the path of the demo script: next to this file in an installed package, in `examples` in a checkout."""
    installed = Path(__file__).parent / "gpt" / "train.py"
    return installed if installed.exists() else Path(__file__).parents[2] / "examples" / "gpt" / "train.py"
