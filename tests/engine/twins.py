"""Training on the ranks of a world, and beside it the same training in one process on the data of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.testing import compare, gather_weights

Loss = Callable[[Any, int, int], Any]
"""The loss of a model, or (sum, count), on the data of (rank, at)."""


CONFIGS: list[dict[str, Any]] = [
    {},
    {"clip_grad_norm": 0.1, "sync": {"shared_memory": False}},
    {"flat_step": False, "sync": {"shared_memory": False, "bucket_mb": 1e-4}},
    {"zero": 1, "clip_grad_norm": 0.1},
    {"zero": {"stage": 2, "bucket_mb": 1e-4}},
]
"""A plain engine, collectives instead of shared memory, the own step of the optimizer, and sharded state."""


@dataclass
class Twins:
    """An engine on this rank, and the truth: the same model and optimizer in one process."""

    context: ParallelContext
    model: nn.Module
    engine: Any
    plain: nn.Module
    reference: torch.optim.Optimizer
    rtol: float

    @property
    def rank(self) -> int:
        return self.context.get_global_rank()

    def train(self, loss: Loss, at: int) -> None:
        """One step of the engine, with one pass."""
        self.engine.zero_grad()
        self.engine.backward(loss(self.engine, self.rank, at))
        self.engine.step()

    def follow(self, loss: Loss, *at: int, places: Sequence[tuple[int, int]] | None = None) -> None:
        """The same step in one process: on the passes `at` of all ranks, or on these (rank, at)."""
        if places is None:
            places = [(rank, one) for rank in range(self.context.world_size) for one in at]
        self.plain.zero_grad()
        losses = [loss(self.plain, *place) for place in places]
        if isinstance(losses[0], tuple):
            mean = sum(total for total, _ in losses) / sum(count for _, count in losses)
        else:
            mean = sum(losses) / len(losses)
        mean.backward()
        limit = self.context.config.get("clip_grad_norm")
        if limit:
            nn.utils.clip_grad_norm_(self.plain.parameters(), limit)
        self.reference.step()

    def compare(self) -> None:
        """The weights of all ranks are those of one process."""
        compare(dict(self.plain.named_parameters()), gather_weights(self.model, self.context), self.rtol)


@contextmanager
def twins(
    config: dict[str, Any], build: Callable[[], nn.Module], make: Callable[[nn.Module], Any], rtol: float = 1e-10
) -> Iterator[Twins]:
    """Twins with equal weights, which are compared at the end of the block."""
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        model, plain = build(), build()
        both = Twins(gpc, model, initialize(model, make(model), context=gpc)[0], plain, make(plain), rtol)
        yield both
        both.compare()
        both.engine.close()
