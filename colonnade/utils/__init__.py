"""Small things that training scripts need: data loaders, activation checkpointing, ports, printing on one rank."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as _checkpoint
from torch.utils.data import DataLoader, Dataset

from colonnade.context.parallel_context import ParallelContext
from colonnade.core import given_or_global, global_context
from colonnade.engine.activations import kept_on_host
from colonnade.utils.sampler import DistinctDataSampler
from colonnade.utils.timer import MultiTimer

__all__ = [
    "DistinctDataSampler",
    "MultiTimer",
    "checkpoint",
    "free_port",
    "get_current_device",
    "get_dataloader",
    "print_rank_0",
]


def get_dataloader(
    dataset: Dataset[Any],
    shuffle: bool = False,
    seed: int = 1024,
    add_sampler: bool = True,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    *,
    context: ParallelContext | None = None,
    **options: Any,
) -> DataLoader[Any]:
    """A DataLoader that gives each rank its share: ranks that see the same data get the same samples.

    One rank has the same order of samples as several, so that a run may go on with another number of ranks.
    """
    context = given_or_global(context)
    sampler = None
    if add_sampler:
        sampler = DistinctDataSampler(
            dataset,  # type: ignore[arg-type]
            context.layout,
            context.get_global_rank(),
            shuffle,
            seed,
            drop_last,
        )
    # torch draws from it on the default device, and takes no generator of another one; the meta device has none.
    default = torch.empty(0).device
    generator = torch.Generator(default if default.type != "meta" else "cpu")
    return DataLoader(
        dataset,
        shuffle=shuffle if sampler is None else None,
        sampler=sampler,
        drop_last=drop_last,
        pin_memory=pin_memory and torch.cuda.is_available(),
        num_workers=num_workers,
        generator=generator.manual_seed(seed),
        **options,
    )


def checkpoint(function: Callable[..., Any], activation_offload: bool, *args: Any, use_reentrant: bool = False) -> Any:
    """Run `function` and compute its activations again in backward; `activation_offload` keeps the inputs of a GPU on the host."""
    with kept_on_host(()) if activation_offload else nullcontext():
        return _checkpoint(function, *args, use_reentrant=use_reentrant)


def get_current_device() -> torch.device:
    """The device of the global context."""
    return global_context.device


def free_port() -> int:
    """A port on this host that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def print_rank_0(message: str) -> None:
    """Print on rank 0 of the global context."""
    if global_context.get_global_rank() == 0:
        print(message)  # noqa: T201 - this is what it is for
