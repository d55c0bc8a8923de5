"""Utilities for training scripts: data loaders, activation checkpointing, free ports, printing on rank 0."""

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

__all__ = [
    "DistinctDataSampler",
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
    """Make a DataLoader with the samples of this rank. Ranks of one model replica (tensor, pipeline, sequence) get the same samples.

    The order of samples does not depend on the number of ranks, so that a run can be resumed with another number of ranks.

    Args:
        dataset: the dataset.
        shuffle: shuffle the samples in every epoch.
        seed: seed of the order.
        add_sampler: use a DistinctDataSampler; False: all ranks get all samples.
        drop_last: drop incomplete batches, and samples that do not fill all ranks.
        pin_memory: pin host memory, if there is a GPU.
        num_workers: worker processes of the loader.
        context: the parallel context; by default the global context.
        options: further arguments of `DataLoader`, such as `batch_size`.

    Example::

        from torch.utils.data import TensorDataset
        from colonnade.utils import get_dataloader

        gpc = colonnade.launch({})
        dataset = TensorDataset(torch.ones(100, 4), torch.ones(100, 2))
        loader = get_dataloader(dataset, shuffle=True, batch_size=10)  # 5 batches on each of two data ranks
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
    # torch draws random numbers on the default device and needs a generator of that device; the meta device has none.
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
    """Run `function` with activation checkpointing; with `activation_offload`, its saved GPU inputs are kept in host memory."""
    with kept_on_host(()) if activation_offload else nullcontext():
        return _checkpoint(function, *args, use_reentrant=use_reentrant)


def get_current_device() -> torch.device:
    """The device of the global context."""
    return global_context.device


def free_port() -> int:
    """Find a TCP port of this host that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def print_rank_0(message: str) -> None:
    """Print on rank 0 of the global context."""
    if global_context.get_global_rank() == 0:
        print(message)  # noqa: T201 - the purpose of this function
