"""Random numbers by position: the number at a place is a function of a key and of that place, so any part is drawn alone.

Whole numbers are the same on every device and machine. A normal number is computed from one in float64, whose last bit
may differ between kinds of devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of splitmix64."""


def uniform(key: int, positions: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """A number between `low` and `high` for each position, in float64."""
    return _fractions(key, positions).mul_(high - low).add_(low)


def normal(key: int, positions: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """A normal number for each position, in float64."""
    return _fractions(key, positions).mul_(2).sub_(1).erfinv_().mul_(std * math.sqrt(2)).add_(mean)


def positions_in(index: Tensor, shape: Sequence[int], offset: int, strides: Sequence[int]) -> Tensor:
    """Where elements number `index` of a tensor of `shape`, counted row by row, lie by these strides."""
    shape, strides = _merged(shape, strides)
    position = torch.full_like(index, offset)
    for size, stride in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        position += index % size * stride
        index = index // size
    return position.add_(index, alpha=strides[0]) if shape else position


def row_strides(shape: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _merged(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """The same with as few dimensions as will do: those that lie one inside the other without a gap are one."""
    sizes: list[int] = []
    steps: list[int] = []
    for size, stride in zip(shape, strides, strict=True):
        if sizes and steps[-1] == size * stride:
            sizes[-1], steps[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            steps.append(stride)
    return sizes, steps


def _fractions(key: int, positions: Tensor) -> Tensor:
    """52 random bits each, as numbers between 0 and 1, both left out."""
    bits = positions.mul(_signed(_GAMMA)).add_(_signed(key))
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(_signed(factor))
    bits.bitwise_xor_(_shifted(bits, 31))
    return _shifted(bits, 12).double().add_(0.5).mul_(2.0**-52)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left: torch's own shift repeats the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number
