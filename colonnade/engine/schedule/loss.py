"""The two forms of a loss: a mean, or (sum, count), which is divided once by the count of all ranks.

Which form a loss has is decided here and nowhere else: `split_loss` reads it, `LossForm` holds a run to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
        return _scalar(loss[0]), _checked_count(loss[1])
    return _scalar(loss), None


def own_loss(output: Any) -> Any:
    """The loss in the output of a model that makes its own, in either form; None if there is none.

    It is `output["loss"]` or `output.loss`, or the output itself where that is one number, or the first of a tuple.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is not None:
        return found
    if isinstance(output, (tuple, list)) and output and _is_number(output[0]):
        return output if len(output) == 2 and _is_number(output[1]) else output[0]
    return output if _is_number(output) else None


class LossForm:
    """The form of the losses of one run: the first loss decides, and a later one of the other form is an error."""

    def __init__(self, allow_counts: bool = True) -> None:
        self._allow_counts = allow_counts
        self.counted: bool | None = None
        """Whether losses are (sum, count); None while there was none."""

    def read(self, loss: Any) -> tuple[Tensor, Count | None]:
        """`split_loss` of a loss of this run."""
        value, count = split_loss(loss)
        self.keep(count is not None)
        return value, count

    def keep(self, counted: bool) -> None:
        """Hold the run to this form."""
        if counted and not self._allow_counts:
            raise GradientError("a loss given as (sum, count) is known to all ranks: leave out loss_everywhere=False")
        if self.counted is not None and self.counted != counted:
            forms = {True: "(sum, count)", False: "a mean"}
            raise GradientError(f"the loss was {forms[not counted]} before and is {forms[counted]} now; use one form")
        self.counted = counted


def _checked_count(count: Any) -> Count:
    """Refuse what is no count. What lies on a device is not waited for: `LossBook` makes such a step not finite."""
    if isinstance(count, Tensor) and count.numel() == 1:
        if count.device.type != "cpu" or (count.isfinite() and count >= 0):
            return count
    elif isinstance(count, (int, float)) and math.isfinite(count) and count >= 0:
        return count
    raise GradientError(
        f"the count of a loss given as (sum, count) is a number from 0 on, as an int, a float or a tensor of one element, "
        f"not {count!r}; it is how many samples or tokens the sum is over"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise GradientError(f"a loss is one number, not {found}: return its mean, or (sum, count)")
    return loss
