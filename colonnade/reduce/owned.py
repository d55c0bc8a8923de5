"""The slice of a bucket that one rank owns: whose elements it has, and their final gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class OwnedSpan:
    """Elements [start, stop) of the parameter at `index`, in memory order; at [at, ...) of the owned slice."""

    index: int
    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class GradientShard:
    """The final gradient of the slice of a bucket that this rank owns."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.landed = False

    def land(self, total: Tensor, factor: float | Tensor, start: int = 0) -> None:
        """Put factor x `total` into it from `start` on, on top of what earlier passes of the step brought."""
        into = self.flat[start : start + total.numel()]
        if self.landed:
            total = total.to(into.device, into.dtype)
            into.add_(total, alpha=factor) if isinstance(factor, float) else into.add_(total * factor)
        elif total.device == into.device and total.dtype == into.dtype:
            torch.mul(total, factor, out=into)
        else:
            into.copy_(total)
            into.mul_(factor)
