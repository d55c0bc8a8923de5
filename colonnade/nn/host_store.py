"""What autograd keeps for backward, in the host's memory: copied out while forward goes on, back a block ahead of backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_SMALLEST = 1 << 16
"""Bytes below which a tensor stays: a copy of it would take longer than it is worth."""

_streams: dict[torch.device, torch.cuda.Stream] = {}
"""Beside the work of a device: what copies out and, after that, back."""
_last: dict[torch.device, weakref.ref[_BlockCall]] = {}
"""The block that ran last: backward comes to it before the next one."""


def kept_on_host(parameters: Iterable[nn.Parameter]) -> saved_tensors_hooks:
    """Inside, what autograd keeps on a GPU goes to pinned memory of the host, but for these parameters and small tensors."""
    block = _BlockCall({parameter.untyped_storage().data_ptr() for parameter in parameters})
    return saved_tensors_hooks(block.pack, _unpack)


@dataclass
class _Kept:
    """One tensor on the host, and while it is on its way back, on the device."""

    block: _BlockCall
    host: Tensor
    device: torch.device
    back: Tensor | None = None

    def fetch(self) -> Tensor:
        with torch.cuda.stream(_stream(self.device)):
            return self.host.to(self.device, non_blocking=True)


class _BlockCall:
    """What one call of a block keeps."""

    def __init__(self, parameters: set[int]) -> None:
        self._parameters = parameters
        self._kept: list[weakref.ref[_Kept]] = []
        self._before: weakref.ref[_BlockCall] | None = None
        self._arrived: torch.cuda.Event | None = None

    def pack(self, tensor: Tensor) -> Tensor | _Kept:
        if not tensor.is_cuda or tensor.nbytes < _SMALLEST or tensor.untyped_storage().data_ptr() in self._parameters:
            return tensor
        if not self._kept:
            self._before, _last[tensor.device] = _last.get(tensor.device), weakref.ref(self)
        stream = _stream(tensor.device)
        # In its own order of elements, which compiled code insists on.
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(stream)
        kept = _Kept(self, host, tensor.device)
        self._kept.append(weakref.ref(kept))
        return kept

    def fetch(self, device: torch.device) -> torch.cuda.Event:
        """Have everything on its way back; the event is when it has arrived."""
        if self._arrived is None:
            for kept in filter(None, (each() for each in self._kept)):
                kept.back = kept.fetch()
            self._arrived = _stream(device).record_event()
        return self._arrived

    def fetch_before(self, device: torch.device) -> None:
        before = self._before() if self._before is not None else None
        if before is not None:
            before.fetch(device)


def _unpack(kept: Tensor | _Kept) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    current = torch.cuda.current_stream(kept.device)
    current.wait_event(kept.block.fetch(kept.device))
    tensor, kept.back = kept.back, None
    if tensor is None:  # a second backward pass over the same graph
        tensor = kept.fetch()
        current.wait_stream(_stream(kept.device))
    tensor.record_stream(current)
    kept.block.fetch_before(kept.device)
    return tensor


def _stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
