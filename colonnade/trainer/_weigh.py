"""What a batch weighs in a mean over batches: what its criterion counted, or its rows."""

from __future__ import annotations

import torch
from torch import Tensor

from colonnade.engine.schedule.base import BaseSchedule

Weight = tuple[Tensor | None, Tensor | float]
"""(sum of the loss, what it is a sum over); (None, 0) where this rank does not know the loss."""


def weigh(schedule: BaseSchedule, loss: Tensor | None) -> Weight:
    """The weight of the batch that was just run. A schedule returns means: without counts there would be means of means."""
    if loss is None:
        return None, 0.0
    count = schedule.loss_count
    if count is None:
        weight: Tensor | float = float(schedule.batch_size or 1)
    else:
        weight = torch.as_tensor(count, dtype=torch.float64, device=loss.device).detach()
    return loss.detach().double().reshape(()) * weight, weight
