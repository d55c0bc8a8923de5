"""The two forms of a loss: a mean, or (sum, count), which is divided once by the count of all ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from colonnade.errors import GradientError

Count = Tensor | int | float


def split_loss(loss: Any) -> tuple[Tensor, Count | None]:
    """(tensor to go backward from, count or None for a plain mean)."""
    if isinstance(loss, (tuple, list)):
        if len(loss) != 2 or not isinstance(loss[0], Tensor):
            raise GradientError(
                f"a loss is a scalar tensor (a mean) or (sum, count), not a {type(loss).__name__} of {len(loss)}"
            )
        return _scalar(loss[0]), loss[1]
    return _scalar(loss), None


def loss_value(loss: Any) -> Tensor:
    """The mean of a loss in either form, detached."""
    value, count = split_loss(loss)
    return (value if count is None else value / count).detach()


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise GradientError(f"a loss is one number, not {found}: return its mean, or (sum, count)")
    return loss
