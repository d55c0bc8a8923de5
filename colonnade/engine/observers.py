"""Who looks on at an engine's steps. Nothing is computed, kept or sent for it where nobody does."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Observer:
    """Is told of the steps of an engine while it is in `engine.observers`; overrides what it wants to hear."""

    def on_loss(self, loss: Any) -> None:
        """A pass has this loss (a mean, or (sum, count)); its backward pass comes next, or has been with a pipeline."""

    def on_reduced(self, scale: float | Tensor | None) -> None:
        """All handlers have run: gradients are final and not clipped. `scale` is what sums were multiplied by, at the end."""

    def on_stepped(self) -> None:
        """The optimizer has stepped."""


class Observers(list[Observer]):
    """Tells each of them, in order."""

    def loss(self, loss: Any) -> None:
        for each in self:
            each.on_loss(loss)

    def reduced(self, scale: float | Tensor | None) -> None:
        for each in self:
            each.on_reduced(scale)

    def stepped(self) -> None:
        for each in self:
            each.on_stepped()
