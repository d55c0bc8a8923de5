"""What a batch weighs in a mean over batches: what its criterion counted, or its rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from colonnade.engine.engine import Engine
from colonnade.engine.schedule.loss import split_loss

Weight = tuple[Tensor | None, Tensor | float]
"""(sum of the loss, what it is a sum over); (None, 0) where this rank does not know the loss."""


class Scale:
    """Stands in for an engine's criterion, and notes the (sum, count) it may give.

    A schedule returns the mean of such a loss; without the count a mean over batches would be a mean of means.
    """

    def __init__(self, criterion: Any) -> None:
        self.criterion = criterion
        self._noted: Weight = (None, 0.0)
        self._so_far: Tensor | float = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss = self.criterion(*args, **kwargs)
        value, count = split_loss(loss)
        if count is not None:
            total, counted = self._noted
            self._noted = (value.detach().double().reshape(()) + (0.0 if total is None else total), count + counted)
        return loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["criterion"], name)

    def weigh(self, engine: Engine, loss: Tensor | None) -> Weight:
        """The weight of the batch that was just run; asked before the engine's step."""
        noted, self._noted = self._noted, (None, 0.0)
        if noted[0] is not None:
            return noted
        if loss is None:
            return None, 0.0
        if pipeline_counts(engine):
            return self._weigh_pipeline(engine, loss)
        weight = float(engine.schedule.batch_size or 1)
        return loss.detach().double().reshape(()) * weight, weight

    def _weigh_pipeline(self, engine: Engine, loss: Tensor) -> Weight:
        """A pipeline keeps its criterion to itself, and tells the engine what a step has counted so far."""
        so_far = engine._book._count
        before = self._so_far if engine._passes > 1 else 0.0
        self._so_far = so_far
        count = so_far - before
        if not isinstance(count, Tensor):  # only the rank of the last stage is told
            return None, 0.0
        return loss.detach().double().reshape(()) * count, count


def pipeline_counts(engine: Engine) -> bool:
    """Whether the criterion of a pipeline gives (sum, count), which only the training step learns."""
    return bool(getattr(engine.schedule, "_counts", False))


@contextmanager
def weighed(engine: Engine) -> Iterator[Scale]:
    """Weigh every batch of an engine inside the block; a block inside it uses the same scale."""
    if isinstance(engine.criterion, Scale):
        yield engine.criterion
        return
    scale = Scale(engine.criterion)
    if engine.criterion is not None:
        engine._criterion = scale
    try:
        yield scale
    finally:
        engine._criterion = scale.criterion
