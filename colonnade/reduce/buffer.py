"""The memory that the gradients of a bucket lie in, with a view for each parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from colonnade.comm.memory import Memory
from colonnade.parallel.placement import is_dtensor
from colonnade.reduce.transports.base import Transport

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
        self.grads = [_like(view, parameter) for view, parameter in zip(self.views, bucket.parameters, strict=True)]
        self._pointers = [view.data_ptr() for view in self.views]

    @property
    def is_whole(self) -> bool:
        """Whether all views are of this memory still."""
        return [view.data_ptr() for view in self.views] == self._pointers


def _like(view: Tensor, parameter: nn.Parameter) -> Tensor:
    """What `.grad` of the parameter is set to: the view, as a DTensor where the parameter is one."""
    if not is_dtensor(parameter):
        return view
    placed: Any = parameter
    return placed.from_local(
        view, placed.device_mesh, placed.placements, run_check=False, shape=placed.shape, stride=placed.stride()
    )
