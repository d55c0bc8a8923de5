"""What a user gives a plan: the functions that make the model, its batch, its loss and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError
from colonnade.hf.model_loss import criterion_of
from colonnade.parallel.split import Split
from colonnade.proof.user_functions import call_given

ASSUMED_OPTIMIZER = "no optimizer was given, so AdamW is assumed"
ASSUMED_LOSS = "no criterion was given and the model has none, so its loss is assumed to cost nothing"


@dataclass(frozen=True)
class Job:
    """Functions of `config` and `context`, either or none of them, as the training script has them.

    `build` returns the model, or what `colonnade.split` returns. `batch` returns what one rank gets for one pass: (data, label),
    a tensor or a dict. `criterion` returns the loss function; without it, the model's `criterion()`. `optimizer` takes parameters.
    """

    build: Callable[..., Any]
    batch: Callable[..., Any]
    criterion: Callable[..., Any] | None = None
    optimizer: Callable[..., Any] | None = None

    def loaded(self, context: ParallelContext) -> Any:
        """What the loader gives a rank for one pass."""
        batch = _called(self.batch, context, "batch")
        if not any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves(batch)):
            raise ConfigError(
                f"the batch's function returned {type(batch).__name__} without a tensor; it returns (data, label), a tensor or a "
                f"dict, as the loader of one rank does"
            )
        return batch

    def loss(self, model: nn.Module | Split, context: ParallelContext, notes: dict[str, None]) -> Any:
        """The criterion."""
        if self.criterion is not None:
            return _called(self.criterion, context, "criterion")
        whole = model.whole if isinstance(model, Split) else model
        own = getattr(whole, "criterion", None)
        if callable(own):
            return own()
        made = criterion_of(whole) if whole is not None else None
        if made is not None:
            return made
        notes[ASSUMED_LOSS] = None
        return _nothing

    def stepper(self, model: nn.Module, notes: dict[str, None]) -> Any:
        """The optimizer of a model that is on the meta device."""
        if self.optimizer is None:
            notes[ASSUMED_OPTIMIZER] = None
            return torch.optim.AdamW(model.parameters())
        return self.optimizer(model.parameters())


def _called(function: Callable[..., Any], context: ParallelContext, what: str) -> Any:
    return call_given(function, {"config": context.config, "context": context}, f"the {what}'s function")


def _nothing(*outputs: Any) -> Tensor:
    """A loss that reads what the model gives."""
    found = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([each.mean().float() for each in found]).sum()
