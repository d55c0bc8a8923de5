"""Small runs that the tests of the trainer share: a classifier, its data, an engine on any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.trainer import Trainer

FEATURES, CLASSES = 6, 3
PIPELINE = {"parallel": {"pipeline": 2}, "schedule": {"type": "OneFOneB", "num_microbatches": 2}}


def samples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return x, x[:, :CLASSES].argmax(1)


def dataset(count: int) -> TensorDataset:
    return TensorDataset(*samples(count))


def model(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, CLASSES)]
    return nn.Sequential(*layers).double()


def stage(gpc: ParallelContext, dropout: float = 0.0) -> nn.Module:
    """The whole model, or this rank's half of it."""
    whole = model(dropout)
    if gpc.pipeline_parallel_size == 1:
        return whole
    first = gpc.get_local_rank(ParallelMode.PIPELINE) == 0
    parts = list(whole.named_children())[:2] if first else list(whole.named_children())[2:]
    half = nn.Sequential()
    for name, layer in parts:
        half.add_module(name, layer)
    return half


def make_trainer(
    config: dict[str, Any],
    criterion: Callable[..., Any] = F.cross_entropy,
    lr: float = 0.0,
    dropout: float = 0.0,
    optimizer: Callable[..., Any] = torch.optim.SGD,
) -> Trainer:
    """A trainer in a world that is already there; it and its context live until the process ends."""
    gpc = launch(config, context=ParallelContext(), verbose=False)
    built = stage(gpc, dropout)
    engine, *_ = initialize(built, optimizer(built.parameters(), lr=lr), criterion, context=gpc)
    return Trainer(engine)


def cut(rows: Sequence[int], count: int, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Batches of these rows, the last one smaller."""
    x, y = samples(count)
    at = list(rows)
    return [(x[at[begin : begin + size]], y[at[begin : begin + size]]) for begin in range(0, len(at), size)]


def uneven(gpc: ParallelContext, count: int, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    """This rank's batches: the first of the ranks that see distinct data gets nearly twice as many as the last."""
    parts = gpc.layout.distinct_data
    here = gpc.get_local_rank(ParallelMode.DATA) if gpc.is_initialized(ParallelMode.DATA) else 0
    bounds = [round(count * (1 - (1 - at / parts) ** 1.5)) for at in range(parts + 1)]
    return cut(range(bounds[here], bounds[here + 1]), count, size)


def run_each(function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """On a rank: what the function gives for each case, one after another in one world."""
    return [function(*case) for case in cases]
