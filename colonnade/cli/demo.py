"""`colonnade demo`: train a small GPT on ranks of this machine, with everything that a run leaves behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from colonnade.errors import ColonnadeError, LaunchError
from colonnade.launching.launch_job import LaunchJob, checked


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where checkpoints, log and the page of the run go.")
    ] = Path("colonnade-demo"),
    nproc: Annotated[int, typer.Option("--nproc", "-n", min=2, help="Ranks, an even number.")] = 4,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to train; without it 200.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint there.")] = False,
    copy: Annotated[
        Path | None, typer.Option("--copy", help="Train nothing; copy the demo's script into this new folder.")
    ] = None,
) -> None:
    """Train a small GPT on 4 ranks of this machine, in about a minute: data 2 x pipeline 2, tied, clipped.

    It needs no network: the text is Python's own reference. It leaves checkpoints, a log, a page of the run and one file of
    weights for plain torch.
    """
    script = demo_script()
    if copy is not None:
        _copy(script.parent, copy)
        return
    if nproc % 2:
        raise LaunchError(
            f"--nproc {nproc} is odd; the demo has two pipeline stages, so give {nproc - 1} or {nproc + 1}", code="C022"
        )
    words = ["--output", str(output), *([] if resume else ["--fresh"]), *(["--steps", str(steps)] if steps else [])]
    job = checked(LaunchJob(target=str(script), nproc=nproc, arguments=tuple(words)))
    from colonnade.launching.launcher import launch

    status = launch(job)
    if status == 0:
        typer.echo(f"look at it:    colonnade ckpt ls {output}")
        typer.echo(f"interrupt it:  colonnade demo -o {output} --resume --steps 400, then Ctrl-C, then the same again")
        typer.echo("make it yours: colonnade demo --copy my-gpt")
    raise typer.Exit(status)


def _copy(source: Path, folder: Path) -> None:
    """The files of the demo as the beginning of a project."""
    if folder.exists():
        raise ColonnadeError(f"{folder} is there already, and nothing is overwritten; give the name of a new folder")
    folder.mkdir(parents=True)
    for file in sorted(source.glob("*.py")):
        shutil.copyfile(file, folder / file.name)
    typer.echo(f"wrote {folder}; run it: colonnade run --nproc 4 {folder / 'train.py'}")


def demo_script() -> Path:
    """The script of the demo: in an installed package beside this file, in a checkout in `examples`."""
    installed = Path(__file__).parent / "gpt" / "train.py"
    return installed if installed.exists() else Path(__file__).parents[2] / "examples" / "gpt" / "train.py"
