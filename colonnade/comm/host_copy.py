"""Copies of small device tensors to the host, without making the host wait for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HOST_COPY_DELAY = 2
"""Number of steps after which ranks read values that they all decide by. By then the copies have usually arrived, and the step is
the same on every rank, while `HostCopy.ready` may differ between ranks."""


class HostCopy:
    """A host copy of the current values of a small tensor. Reading waits only for device work enqueued before the copy."""

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
        """Whether the tensor was on the host."""
        return self._done is None

    def ready(self) -> bool:
        """Whether `read` returns without waiting."""
        return self._done is None or self._done.query()

    def read(self) -> Any:
        """The value as a number or a list."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy.tolist()
