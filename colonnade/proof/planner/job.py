"""The input of a plan: functions that make the model, a batch, the loss and the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError
from colonnade.proof.user_functions import call_given

ASSUMED_OPTIMIZER = "no optimizer was given, so AdamW is assumed"
ASSUMED_LOSS = "no criterion was given and the model has none, so its loss is assumed to cost nothing"


@dataclass(frozen=True)
class Job:
    """The functions of a training script that `plan` calls.

    Each may have the parameters `config` and `context`, or none.

    `build` returns the model, or the result of `colonnade.split`. `batch` returns the data of one rank for one pass:
    (data, label), a tensor or a dict. `criterion` returns the loss function; default: the model's `criterion()`.
    `optimizer` is called with parameters.
    """

    build: Callable[..., Any]
    batch: Callable[..., Any]
    criterion: Callable[..., Any] | None = None
    optimizer: Callable[..., Any] | None = None

    def loaded(self, context: ParallelContext) -> Any:
        """Return the batch of one rank for one pass. Raises ConfigError if the batch has no tensor."""
        batch = _called(self.batch, context, "batch")
        if not any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves(batch)):
            raise ConfigError(
                f"the batch's function returned {type(batch).__name__} without a tensor; it returns (data, label), a tensor or a "
                f"dict, as the loader of one rank does"
            )
        return batch

    def given_criterion(self, model: nn.Module, context: ParallelContext) -> Any:
        """Return the criterion of the job, or the result of the model's `criterion()`; None if there is neither."""
        if self.criterion is not None:
            return _called(self.criterion, context, "criterion")
        own = getattr(model, "criterion", None)
        return own() if callable(own) else None

    def stepper(self, model: nn.Module, notes: dict[str, None]) -> Any:
        """Make the optimizer for a model on the meta device; AdamW, with a note, if the job has none."""
        if self.optimizer is None:
            notes[ASSUMED_OPTIMIZER] = None
            return torch.optim.AdamW(model.parameters())
        return self.optimizer(model.parameters())


def _called(function: Callable[..., Any], context: ParallelContext, what: str) -> Any:
    return call_given(function, {"config": context.config, "context": context}, f"the {what}'s function")


def no_loss(*outputs: Any) -> Tensor:
    """Return a loss that depends on all outputs of the model, for jobs without a criterion."""
    found = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([each.mean().float() for each in found]).sum()
