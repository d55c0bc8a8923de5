"""The two forms of a loss: a mean, or (sum, count), which is divided once by the count of all ranks.

Which form a loss has is decided here and nowhere else: `split_loss` reads it, `LossForm` holds a run to it.
"""

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


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise GradientError(f"a loss is one number, not {found}: return its mean, or (sum, count)")
    return loss
