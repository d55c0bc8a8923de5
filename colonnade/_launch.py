"""Launch: from a config to a running world, whoever started the processes."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from colonnade import logging as _logging
from colonnade.comm import failing
from colonnade.config import Config
from colonnade.config.files import refuse_in_a_config
from colonnade.context.environment import OPENMPI, SLURM, TORCH, WorldAddress, detect, override, read
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.context.rendezvous import telling_the_others
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
    """Join the world and create the groups that the config asks for. Collective over the world.

    Rank, world size, host and port come from the arguments, else from torch.distributed if it is already
    initialised, else from the environment (torchrun's variables), else this is a world of one. The backend is
    nccl where there is CUDA, gloo elsewhere.
    `timeout`: the seconds that a rank waits for the others at most, to join and in every collective; 1800 unless given
    (torch's own limit where torch.distributed was initialised before), which leaves room for a rank that writes a
    checkpoint or prepares data while the others wait. Where nothing long can be going on (the agreements of `launch`, once all ranks
    have joined) it is 120 at most. Long before that, about 8 seconds after it began to wait, a rank
    that has joined says where the others are. A config that is refused on one rank alone is an error on every rank,
    at once.
    `seed` (else the config's, else 1024) seeds torch, Python and numpy: alike on ranks that see the same data.
    `context` is filled and returned; by default `colonnade.core.global_context`.
    """
    address = override(_running_world() or detect(), rank, world_size, local_rank, host, port)
    return _start(config, address, backend, seed, verbose, context, timeout)


def launch_from_torch(config: ConfigSource, backend: str | None = None, **options: Any) -> ParallelContext:
    """`launch` for processes started by torchrun, `python -m torch.distributed.launch` or `colonnade run`."""
    return _start(config, read(TORCH), backend, **options)


def launch_from_slurm(
    config: ConfigSource, host: str, port: int, backend: str | None = None, **options: Any
) -> ParallelContext:
    """`launch` for processes started by srun; `host` and `port` are those of rank 0."""
    return _start(config, read(SLURM, host=host, port=port), backend, **options)


def launch_from_openmpi(
    config: ConfigSource, host: str, port: int, backend: str | None = None, **options: Any
) -> ParallelContext:
    """`launch` for processes started by mpirun; `host` and `port` are those of rank 0."""
    return _start(config, read(OPENMPI, host=host, port=port), backend, **options)


def get_default_parser() -> argparse.ArgumentParser:
    """The arguments every training script takes; add your own.

    `--local_rank` and `--local-rank` are both accepted, because `torch.distributed.launch` passes the latter.
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
    refuse_in_a_config()
    context = global_context if context is None else context
    where = (address.rank, address.world_size, address.host, address.port, timeout)
    with telling_the_others(*where, address.local_rank):
        check_torch(torch.__version__)
        context.load_config(config)
        chosen = _seed(context.config, seed)
    context.verbose = verbose
    context.init_global_dist(address.rank, address.world_size, backend, address.host, address.port, timeout)
    if context.world_size > 1:
        failing.install()
    try:
        context.set_device(address.local_rank)
        _logging.attach(_rank_in(context), verbose)
        context.init_parallel_groups(chosen)
        context.set_seed(chosen)
        context.config.freeze()
    except BaseException:
        # A failed launch leaves nothing behind, so that the caller may correct the config and try again.
        context.destroy()
        raise
    _logging.get_dist_logger().info(f"{context!r}; {address.source}; device {context.device}")
    return context


def check_torch(version: str) -> None:
    """Refuse a torch that lacks what this library stands on."""
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise LaunchError(
            f"torch {version} is too old: Colonnade needs torch {least} or newer. Upgrade torch.", code="C023"
        )


def _seed(config: Config, seed: int | None) -> int:
    """The argument, else the config's `seed`, else the default."""
    chosen = config.get("seed") if seed is None else seed
    return DEFAULT_SEED if chosen is None else int(chosen)


def _running_world() -> WorldAddress | None:
    """The world that torch.distributed has already joined, if any."""
    if not dist.is_initialized():
        return None
    return WorldAddress(dist.get_rank(), dist.get_world_size(), source="torch.distributed, already initialised")


def _rank_in(context: ParallelContext) -> Any:
    def rank_of(mode: Any) -> int:
        if mode is None or not context.is_initialized(mode):
            return context.get_global_rank()
        return context.get_local_rank(ParallelMode(mode))

    return rank_of
