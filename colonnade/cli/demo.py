"""`colonnade demo`: train a small GPT on ranks of this machine, with everything that a run leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from colonnade.cli.job import Job, checked


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where checkpoints, log and picture go.")] = Path(
        "colonnade-demo"
    ),
    nproc: Annotated[int, typer.Option("--nproc", "-n", min=2, help="Ranks, an even number.")] = 4,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to train; without it 200.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint there.")] = False,
) -> None:
    """Train a small GPT on 4 ranks of this machine, in about a minute: data 2 x pipeline 2, tied, clipped.

    It needs no network: the text is Python's own reference. It leaves checkpoints, a log, a picture of the run and one file of
    weights for plain torch.
    """
    script = demo_script()
    words = ["--output", str(output), *([] if resume else ["--fresh"]), *(["--steps", str(steps)] if steps else [])]
    job = checked(Job(target=str(script), nproc=nproc, arguments=tuple(words)))
    from colonnade.cli.launcher import launch

    status = launch(job)
    if status == 0:
        typer.echo(f"look at it:    colonnade ckpt ls {output}")
        typer.echo(f"kill it:       colonnade demo --output {output} --resume --steps 400, Ctrl-C, and the same again")
        typer.echo(f"make it yours: {script} with model.py, text.py and config.py beside it")
    raise typer.Exit(status)


def demo_script() -> Path:
    """The script of the demo: in an installed package beside this file, in a checkout in `examples`."""
    installed = Path(__file__).parent / "gpt" / "train.py"
    return installed if installed.exists() else Path(__file__).parents[2] / "examples" / "gpt" / "train.py"
