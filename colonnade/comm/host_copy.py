"""Numbers of a device on their way to the host, without making the host wait for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

STEPS_LATE = 2
"""After how many steps numbers are read that all ranks decide by: by then they have usually come, and it is the same step
on every rank. What has come (`ready`) is not the same on all."""


class HostCopy:
    """A copy of a small tensor as it is now. Reading it waits for nothing younger than it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
            self._copy.copy_(tensor.detach(), non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        else:
            self._copy = tensor.detach().clone()

    @property
    def on_host(self) -> bool:
        """Whether the number was on the host from the start."""
        return self._done is None

    def ready(self) -> bool:
        """Whether it can be read without waiting."""
        return self._done is None or self._done.query()

    def read(self) -> Any:
        """The number, or the list of numbers."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy.tolist()
