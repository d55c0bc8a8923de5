"""`launch`: joins the world that a config describes, with any launcher.

`launch` determines rank and address (`WorldAddress`: from arguments, else from the environment of the launcher, else a single
process), reads the config, joins the world, creates the process groups of every mode and sets the seeds. If it fails on one rank,
it raises on all ranks.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from colonnade import logging as _logging
from colonnade.comm import waits
from colonnade.config import Config
from colonnade.config.config import reject_script_as_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.context.rendezvous import share_start_up_errors
from colonnade.core import global_context
from colonnade.errors import LaunchError

DEFAULT_SEED = 1024
LEAST_TORCH = (2, 11)

ConfigSource = Config | dict[str, Any] | str | Path


def launch(
    config: ConfigSource,
    rank: int | None = None,
    world_size: int | None = None,
    host: str | None = None,
    port: int | None = None,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int | None = None,
    verbose: bool = True,
    *,
    context: ParallelContext | None = None,
    timeout: float | None = None,
) -> ParallelContext:
    """Join the world, create the process groups of the config and set the seeds. Collective over the world.

    Rank, world size, host and port come from the arguments, else from torch.distributed if it is initialised already, else
    from torchrun's environment variables; otherwise this is a single process. An invalid config on one rank is an error on
    all ranks at once.

    Args:
        config: a dict, a `Config`, or the path of a config file.
        rank: the rank of this process; given together with `world_size`.
        world_size: the number of ranks.
        host: the address of rank 0.
        port: the port of rank 0.
        backend: "nccl", "gloo" or "mpi"; by default nccl with CUDA, else gloo.
        local_rank: the rank of this process on its host, which selects its device.
        seed: seeds torch, Python and numpy, alike on ranks that see the same data; by default the config's seed, or 1024.
        verbose: whether INFO lines are logged.
        context: the context to fill; by default `colonnade.core.global_context`.
        timeout: the longest time in seconds that a rank waits for the others, to join and in every collective. The
        default, 1800, leaves room for a rank that writes a checkpoint or prepares data. If torch.distributed was
        initialised before, the default is torch's own timeout. The agreements at the end of `launch` wait at most 120
        seconds. A rank that waits logs the
            positions of the others after about 8 seconds.

    Returns:
        The context.

    Raises:
        ConfigError: the config is invalid, on any rank.
        LaunchError: rank, world size or address are missing or invalid, or torch is too old.

    Example::

        gpc = colonnade.launch(dict(parallel=dict(tensor=dict(size=2, mode="1d")), clip_grad_norm=1.0))
        print(gpc.get_local_rank(colonnade.ParallelMode.TENSOR))
        gpc.destroy()
    """
    known = detect()
    if dist.is_initialized():
        known = WorldAddress(dist.get_rank(), dist.get_world_size(), source="torch.distributed, already initialised")
    address = override(known, rank, world_size, local_rank, host, port)
    return _start(config, address, backend, seed, verbose, context, timeout)


def launch_from_torch(config: ConfigSource, backend: str | None = None, **options: Any) -> ParallelContext:
    """`launch` for processes started by torchrun, `python -m torch.distributed.launch` or `colonnade run`."""
    return _start(config, read(TORCH), backend, **options)


def launch_from_slurm(
    config: ConfigSource, host: str, port: int, backend: str | None = None, **options: Any
) -> ParallelContext:
    """`launch` for processes started by srun; `host` and `port` are the address of rank 0."""
    return _start(config, read(SLURM, host=host, port=port), backend, **options)


def launch_from_openmpi(
    config: ConfigSource, host: str, port: int, backend: str | None = None, **options: Any
) -> ParallelContext:
    """`launch` for processes started by mpirun; `host` and `port` are the address of rank 0."""
    return _start(config, read(OPENMPI, host=host, port=port), backend, **options)


def get_default_parser() -> argparse.ArgumentParser:
    """An argument parser with the usual arguments of a training script, to extend with your own.

    Both `--local_rank` and `--local-rank` are accepted: `torch.distributed.launch` passes the latter.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=str, help="path of the config file")
    parser.add_argument("--host", type=str, help="address of rank 0")
    parser.add_argument("--port", type=int, help="port of rank 0")
    parser.add_argument("--world_size", type=int, help="number of ranks")
    parser.add_argument("--rank", type=int, help="rank of this process")
    parser.add_argument("--local_rank", "--local-rank", type=int, help="rank of this process on its host")
    parser.add_argument("--backend", type=str, default=None, help="nccl, gloo or mpi; by device if left out")
    return parser


def _start(
    config: ConfigSource,
    address: WorldAddress,
    backend: str | None,
    seed: int | None = None,
    verbose: bool = True,
    context: ParallelContext | None = None,
    timeout: float | None = None,
) -> ParallelContext:
    reject_script_as_config()
    context = global_context if context is None else context
    # There is no process group yet. An error of this rank goes to the store, where the other ranks wait, and ends all of them.
    where = (address.rank, address.world_size, address.host, address.port, timeout)
    with share_start_up_errors(*where, address.local_rank):
        check_torch(torch.__version__)
        context.load_config(config)
        chosen = context.config.get("seed") if seed is None else seed
        chosen = DEFAULT_SEED if chosen is None else int(chosen)
    context.verbose = verbose
    # From here on all ranks are connected, and agree on errors by collectives.
    context.init_global_dist(address.rank, address.world_size, backend, address.host, address.port, timeout)
    if context.world_size > 1:
        waits.install()
    try:
        context.set_device(address.local_rank)
        _logging.attach(partial(_rank_in, context), verbose)
        context.init_parallel_groups(chosen)
        context.set_seed(chosen)
        context.config.freeze()
    except BaseException:
        # Clean up completely, so that a notebook can correct the config and call launch again.
        context.destroy()
        raise
    _logging.get_dist_logger().debug(f"{context!r}; {address.source}; device {context.device}")
    return context


def _rank_in(context: ParallelContext, mode: Any) -> int:
    """The rank of this process in its group of `mode` (without such a group: in the world), for log lines."""
    if mode is None or not context.is_initialized(mode):
        return context.get_global_rank()
    return context.get_local_rank(ParallelMode(mode))


def check_torch(version: str) -> None:
    """Raise if torch is older than the oldest supported version."""
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise LaunchError(
            f"torch {version} is too old: Colonnade needs torch {least} or newer. Upgrade torch.", code="C023"
        )


# --------------------------------------------------------------------------------------------------
# Rank, world size and address: from arguments, else from the environment of the launcher, else a single process.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorldAddress:
    """The rank of a process, the address of rank 0, and the source of these values, for messages."""

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    host: str | None = None
    port: int | None = None
    source: str = "no launcher: a world of one"


@dataclass(frozen=True)
class Launcher:
    """The environment variables in which a launcher passes rank, world size and local rank."""

    name: str
    rank: str
    world_size: str
    local_rank: str


TORCH = Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK")
SLURM = Launcher("SLURM", "SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID")
OPENMPI = Launcher("OpenMPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")


def detect(environ: Mapping[str, str] | None = None) -> WorldAddress:
    """Read torchrun's environment variables; without them, return the address of a single process.

    The variables of SLURM and OpenMPI are read only by `launch_from_slurm` and `launch_from_openmpi`: a plain script
    inside an allocation has these variables too, although it is a single process.
    """
    environ = os.environ if environ is None else environ
    return read(TORCH, environ) if TORCH.rank in environ or TORCH.world_size in environ else WorldAddress()


def read(
    launcher: Launcher,
    environ: Mapping[str, str] | None = None,
    host: str | None = None,
    port: int | None = None,
) -> WorldAddress:
    """Read the variables of one launcher.

    Raises:
        LaunchError: a variable is missing or invalid; the message names it.
    """
    environ = os.environ if environ is None else environ
    local = environ.get(launcher.local_rank)
    port_text = environ.get("MASTER_PORT")
    address = WorldAddress(
        rank=_number(launcher, launcher.rank, environ),
        world_size=_number(launcher, launcher.world_size, environ),
        local_rank=int(local) if local is not None and local.isdigit() else None,
        host=host or environ.get("MASTER_ADDR"),
        port=port if port is not None else _port(port_text) if port_text else None,
        source=launcher.name,
    )
    _check(address)
    return address


def override(
    address: WorldAddress,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    host: str | None = None,
    port: int | None = None,
) -> WorldAddress:
    """Replace detected values of `address` by the arguments that are not None."""
    given = {"rank": rank, "world_size": world_size, "local_rank": local_rank, "host": host, "port": port}
    changed = {name: value for name, value in given.items() if value is not None}
    # With a launcher, one of the two may correct its value. Without, the other one would be that of a single process.
    if (rank is None) != (world_size is None) and address.world_size == 1:
        raise LaunchError(
            f"launch() got rank={rank} and world_size={world_size}; pass both, or leave both out", code="C020"
        )
    result = replace(address, **changed) if changed else address  # type: ignore[arg-type]
    _check(result)
    return result


def _number(launcher: Launcher, variable: str, environ: Mapping[str, str]) -> int:
    text = environ.get(variable)
    if text is None:
        left_over = [name for name in (launcher.rank, launcher.world_size) if name in environ]
        single = f"unset {left_over[0]}, which is left over," if left_over else "call launch(config)"
        raise LaunchError(
            f"the environment variable {variable} is not set, so {launcher.name} did not start this process. Start it "
            f"with {launcher.name} or with `colonnade run --nproc N script.py`, or {single} for a single process.",
            code="C020",
        )
    if not text.isdigit():
        raise LaunchError(f"the environment variable {variable} is {text!r}; it must be a number", code="C020")
    return int(text)


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise LaunchError(f"MASTER_PORT is {text!r}; it must be a number from 1 to 65535", code="C020")
    return int(text)


def _check(address: WorldAddress) -> None:
    for name, value in (("rank", address.rank), ("world_size", address.world_size)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise LaunchError(f"{name} must be an integer, not {value!r}", code="C020")
    if not 0 <= address.rank < address.world_size:
        raise LaunchError(
            f"rank {address.rank} does not exist in a world of {address.world_size} ranks: ranks are 0 to world_size "
            f"- 1. Correct the values from {address.source}.",
            code="C020",
        )
    if address.port is not None and not (isinstance(address.port, int) and 0 < address.port < 65536):
        raise LaunchError(f"port must be a number from 1 to 65535, not {address.port!r}", code="C020")
