"""The memory that the gradients of a bucket lie in, with a view for each parameter; and that of the slice a rank owns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from colonnade.comm.memory import Memory
from colonnade.parallel.dtensor import as_dtensor
from colonnade.parallel.placement import is_dtensor
from colonnade.reduce.transports.base import Transport, is_one

if TYPE_CHECKING:
    from colonnade.reduce.bucket import Bucket


class Buffer:
    """Memory that the gradients of a bucket lie in: all of it (`flat`), and a view per parameter."""

    def __init__(self, bucket: Bucket, memory: Memory) -> None:
        self.memory = memory
        self.flat = memory.own
        self.look(bucket)
        self.transport: Transport

    def look(self, bucket: Bucket) -> None:
        """Make the views; anew after somebody has given one other memory, as `Module.to` does with all gradients."""
        # `.data` is what gives a view its own version counter.
        self.views = [view.data for view in bucket.layout.views(self.flat[: bucket.layout.numel])]
        pairs = zip(self.views, bucket.parameters, strict=True)
        self.grads = [
            as_dtensor(view, like) if is_dtensor(like) else view for view, like in pairs
        ]  # what `.grad` is set to
        self._pointers = [view.data_ptr() for view in self.views]

    @property
    def is_whole(self) -> bool:
        """Whether all views are of this memory still."""
        return [view.data_ptr() for view in self.views] == self._pointers


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
        wider = total.dtype.itemsize > into.dtype.itemsize  # a sum may be too large for what is narrower; a mean is not
        if wider or (isinstance(factor, Tensor) and total.device != into.device):
            # A factor that a device made is there.
            total, factor = (total if wider else total.to(into.dtype)) * factor, 1.0
        if self.landed:
            total = total.to(into.device, into.dtype)
            into.add_(total, alpha=factor) if isinstance(factor, float) else into.add_(total * factor)
        elif total.device == into.device and total.dtype == into.dtype:
            torch.mul(total, factor, out=into)
        else:
            into.copy_(total)
            if not is_one(factor):
                into.mul_(factor)
