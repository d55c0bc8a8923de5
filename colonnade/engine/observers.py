"""Who looks on at an engine's steps. Nothing is computed, kept or sent for it where nobody does."""

from __future__ import annotations

import importlib
import os
from typing import Any

from torch import Tensor

ON_ENGINE = "COLONNADE_ON_ENGINE"
"""If set in the environment, a function `module:name` that is called with every new engine, on every rank."""


def announce(engine: Any) -> None:
    """Call whom the environment names."""
    if ON_ENGINE in os.environ:
        module, _, name = os.environ[ON_ENGINE].partition(":")
        getattr(importlib.import_module(module), name)(engine)


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
