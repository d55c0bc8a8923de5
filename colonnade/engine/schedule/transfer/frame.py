"""A message in one piece of memory: a header of two integers, then the bytes of its tensors.

Each tensor starts on a multiple of 64 bytes, so that it can be used where it lies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from colonnade.engine.schedule.transfer.values import Meta

HEADER_BYTES = 64


def payload_bytes(tensors: Iterable[Tensor | Meta]) -> int:
    """The bytes that these tensors take in a frame; both ends count alike."""
    return sum(_padded(math.prod(item.shape) * item.dtype.itemsize) for item in tensors)


def empty_frame(payload: int) -> Tensor:
    """Memory for a frame with at most so many bytes of tensors."""
    return torch.empty(HEADER_BYTES + payload, dtype=torch.uint8)


def pack(header: tuple[int, int], tensors: Sequence[Tensor] = ()) -> Tensor:
    """A frame with a copy of the tensors, from wherever they are."""
    frame = empty_frame(payload_bytes(tensors))
    frame[:16].view(torch.int64).copy_(torch.tensor(header))
    for place, tensor in zip(_places(frame, tensors), tensors, strict=True):
        place.copy_(tensor.detach())
    return frame


def header_of(frame: Tensor) -> tuple[int, int]:
    """The two integers of a frame that has come."""
    first, second = frame[:16].view(torch.int64).tolist()
    return first, second


def unpack(frame: Tensor, metas: Sequence[Meta]) -> list[Tensor]:
    """The tensors in a frame, in its memory."""
    # .data: each counts its own changes, or one changed in place would spoil the backward pass of the others.
    return [place.data for place in _places(frame, metas)]


def _places(frame: Tensor, tensors: Sequence[Tensor | Meta]) -> list[Tensor]:
    places, start = [], HEADER_BYTES
    for item in tensors:
        size = math.prod(item.shape) * item.dtype.itemsize
        places.append(frame[start : start + size].view(item.dtype).view(item.shape))
        start += _padded(size)
    return places


def _padded(size: int) -> int:
    return -(-size // 64) * 64
