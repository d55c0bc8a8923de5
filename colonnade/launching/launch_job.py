"""What `colonnade run` was asked to do, checked before anything heavy is imported or started."""

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
"""Which ranks have their lines marked with their number."""


@dataclass(frozen=True)
class LaunchJob:
    """One `colonnade run`. `nproc` None means one rank per GPU, or one rank."""

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
    """Return the job if it can be started; raise `LaunchError` with the next step if not."""
    _check_target(job)
    _check_number(job)
    _check_nodes(job)
    _make_log_dir(job)
    return job


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _check_target(job: LaunchJob) -> None:
    if job.is_module:
        top = job.target.partition(".")[0]
        if not top or importlib.util.find_spec(top) is None:
            raise LaunchError(
                f"there is no module {top!r} to run. Is it installed, or is this another folder?", code="C022"
            )
        return
    script = local_path(job.target, "the script", LaunchError)
    if script.is_file():
        return
    if script.is_dir():
        raise LaunchError(f"{script} is a folder. Give a script in it, or -m for a module.", code="C022")
    folder = script.parent if script.parent.is_dir() else Path()
    known = [str(file.relative_to(Path()) if folder == Path() else file) for file in folder.glob("*.py")]
    raise LaunchError(
        f"there is no script {job.target!r}, seen from {Path.cwd()}.{did_you_mean(job.target, known)}", code="C022"
    )


def _check_number(job: LaunchJob) -> None:
    most = max(_MOST, _MOST_PER_CORE * cores())
    if job.nproc is not None and job.nproc > most:
        raise LaunchError(
            f"--nproc {job.nproc} is more than this machine can start: it has {cores()} cores, so give at most {most}, "
            f"or use several machines with --nnodes.",
            code="C022",
        )
    if job.nproc is not None and job.nproc > _MANY_PER_CORE * cores():
        typer.echo(
            f"colonnade: {job.nproc} ranks share {cores()} cores; expect it to be slow to start, "
            "and each rank to need its own memory.",
            err=True,
        )


def _check_nodes(job: LaunchJob) -> None:
    if job.nnodes == 1:
        if job.node_rank not in (None, 0):
            raise LaunchError(f"--node-rank {job.node_rank} needs --nnodes above it.", code="C022")
    elif job.node_rank is not None and not 0 <= job.node_rank < job.nnodes:
        raise LaunchError(
            f"--node-rank {job.node_rank} must be 0 to {job.nnodes - 1} with --nnodes {job.nnodes}.", code="C022"
        )
    if job.nnodes == 1 and job.endpoint is None:
        return
    host, _, port = (job.endpoint or "").rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port[:6]) <= _LAST_PORT:
        raise LaunchError(
            f"several machines meet at --rdzv-endpoint HOST:PORT, the same on every machine, "
            f"with a free port on one of them (a port from 1 to {_LAST_PORT}); got {job.endpoint!r}.",
            code="C022",
        )


def _make_log_dir(job: LaunchJob) -> None:
    if job.log_dir is None:
        return
    if job.log_dir.exists() and not job.log_dir.is_dir():
        raise LaunchError(
            f"--log-dir {job.log_dir} is a file. Give a folder; it is made if it is missing.", code="C022"
        )
    try:
        job.log_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=job.log_dir).close()
    except OSError as error:
        raise LaunchError(
            f"--log-dir {job.log_dir} cannot be written: {error.strerror}. Give another folder.", code="C022"
        ) from error
