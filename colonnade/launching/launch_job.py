"""The job of `colonnade run`, checked before heavy imports and before any process starts."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer

from colonnade.errors import LaunchError, did_you_mean
from colonnade.paths import local_path

_MANY_PER_CORE = 8
_LAST_PORT = 65535
_MOST_PER_CORE, _MOST = 64, 1024

Prefix = Literal["others", "all", "none"]
"""The ranks whose lines start with their number."""


@dataclass(frozen=True)
class LaunchJob:
    """The arguments of `colonnade run`. `nproc=None` means one rank per GPU, or one rank without GPUs."""

    target: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    nproc: int | None = None
    as_colossalai: bool = False
    log_dir: Path | None = None
    prefix: Prefix = "others"
    max_restarts: int = 0
    grace: int = 30
    nnodes: int = 1
    node_rank: int | None = None
    endpoint: str | None = None


def checked(job: LaunchJob) -> LaunchJob:
    """Return the job if it can be started, and create its log folder; raise LaunchError otherwise."""
    _check_target(job)

    most = max(_MOST, _MOST_PER_CORE * cores())
    if job.nproc is not None and job.nproc > most:
        raise LaunchError(
            f"--nproc is {job.nproc}, but this machine has only {cores()} cores. Give at most {most}, or use several "
            "machines with --nnodes.",
            code="C022",
        )
    if job.nproc is not None and job.nproc > _MANY_PER_CORE * cores():
        typer.echo(
            f"colonnade: {job.nproc} ranks share {cores()} cores; the start will be slow, and each rank needs its own memory.",
            err=True,
        )

    if job.nnodes == 1 and job.node_rank not in (None, 0):
        raise LaunchError(f"--node-rank {job.node_rank} needs a larger --nnodes.", code="C022")
    if job.nnodes > 1 and job.node_rank is not None and not 0 <= job.node_rank < job.nnodes:
        raise LaunchError(
            f"--node-rank {job.node_rank} must be 0 to {job.nnodes - 1} with --nnodes {job.nnodes}.", code="C022"
        )
    if job.nnodes > 1 or job.endpoint is not None:
        host, _, port = (job.endpoint or "").rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port[:6]) <= _LAST_PORT:
            raise LaunchError(
                "a job on several machines needs --rdzv-endpoint HOST:PORT, but --rdzv-endpoint is "
                f"{job.endpoint!r}. Give the address of one machine and a free port (1 to {_LAST_PORT}). Give the "
                "same value on every machine.",
                code="C022",
            )

    if job.log_dir is not None:
        if job.log_dir.exists() and not job.log_dir.is_dir():
            raise LaunchError(
                f"--log-dir {job.log_dir} is a file. Give a folder; a missing one is created.", code="C022"
            )
        try:
            job.log_dir.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=job.log_dir).close()
        except OSError as error:
            raise LaunchError(
                f"--log-dir {job.log_dir} cannot be written: {error.strerror}. Give another folder.", code="C022"
            ) from error
    return job


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _check_target(job: LaunchJob) -> None:
    if job.is_module:
        top = job.target.partition(".")[0]
        if not top or importlib.util.find_spec(top) is None:
            raise LaunchError(
                f"there is no module {top!r} to run. Install it, or run the command in its folder.", code="C022"
            )
        return
    script = local_path(job.target, "the script", LaunchError)
    if script.is_file():
        return
    if script.is_dir():
        raise LaunchError(f"{script} is a folder. Give a script in it, or use -m for a module.", code="C022")
    folder = script.parent if script.parent.is_dir() else Path()
    known = [str(file.relative_to(Path()) if folder == Path() else file) for file in folder.glob("*.py")]
    raise LaunchError(
        f"there is no script {job.target!r} (current folder: {Path.cwd()}).{did_you_mean(job.target, known)}",
        code="C022",
    )
