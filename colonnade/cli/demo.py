"""`colonnade demo`: train a small GPT on ranks of this machine, with checkpoints, log and HTML report."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from colonnade.errors import ColonnadeError, LaunchError
from colonnade.launching.launch_job import LaunchJob, checked


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
            f"--nproc {nproc} is odd; the demo has two pipeline stages, so give {nproc - 1} or {nproc + 1}", code="C022"
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
        raise ColonnadeError(f"{folder} already exists and is never overwritten; give the name of a new folder")
    folder.mkdir(parents=True)
    for file in sorted(source.glob("*.py")):
        shutil.copyfile(file, folder / file.name)
    typer.echo(f"wrote {folder}; run it: colonnade run --nproc 4 {folder / 'train.py'}")


def demo_script() -> Path:
    """The script of the demo: next to this file in an installed package, in `examples` in a checkout."""
    installed = Path(__file__).parent / "gpt" / "train.py"
    return installed if installed.exists() else Path(__file__).parents[2] / "examples" / "gpt" / "train.py"
