"""Products of rows that are sorted by expert with the experts' weights: one grouped GEMM, whose sizes stay on the device."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.logging import get_dist_logger

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16
"""Bytes: what torch's grouped_mm wants the rows of its matrices to be multiples of."""
_ONES = 8
"""Columns of ones that a bias is multiplied by; the least that the alignment allows in every dtype."""


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows x of each group times the group's own matrix; ends[i] (int32) is the row behind the last of group i.

    What the result has behind the last group means nothing. torch's grouped_mm, and where it does not take the dtype
    or the sizes a loop over the groups, which has to ask the device for the ends.
    """
    if why_not(x, weight, compiled=torch.compiler.is_compiling()) is None:
        return F.grouped_mm(x, weight, offs=ends)
    return _loop(x, weight, ends)


def grouped_affine(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """x weight + bias of each group. The bias is a product with ones, so that its gradient is one too."""
    out = grouped_mm(x, weight, ends)
    if bias is None:
        return out
    ones = x.new_ones(len(x), _ONES)
    return out + grouped_mm(ones, F.pad(bias.unsqueeze(1), (0, 0, 0, _ONES - 1)), ends)


def why_not(x: Tensor, weight: Tensor, *, compiled: bool = False) -> str | None:
    """Why torch's grouped_mm cannot be used for this product; None where it can."""
    if x.device.type not in ("cpu", "cuda"):
        return f"on {x.device.type}"
    if x.dtype not in _DTYPES:
        return f"of {x.dtype}"
    if compiled and x.dtype != torch.bfloat16:
        return f"of {x.dtype} in compiled code"
    if any(size * x.element_size() % _ALIGNMENT for size in weight.shape[1:]):
        return f"with {x.dtype} weights of {weight.size(1)} x {weight.size(2)}, rows of which are not multiples of 16 bytes"
    return None


def _loop(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """As grouped_mm, by an operator of our own: compiled code keeps it as it is, and does not see that it waits."""
    return torch.ops.colonnade.grouped_mm(x, weight, ends)


def _group_by_group(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The same, group by group; also, for gradients, columns x of each group times rows `weight`: (groups, m, n)."""
    if x.is_cuda and weight.dim() == 3:
        _tell(why_not(x, weight) or why_not(x, weight, compiled=True))
    out, start = x.new_zeros(_shape(x, weight, ends)), 0
    for at, stop in enumerate(ends.tolist()):
        if weight.dim() == 3:
            torch.mm(x[start:stop], weight[at], out=out[start:stop])
        else:
            torch.mm(x[:, start:stop], weight[start:stop], out=out[at])
        start = stop
    return out


def _shape(x: Tensor, weight: Tensor, ends: Tensor) -> tuple[int, ...]:
    return (len(x), weight.size(2)) if weight.dim() == 3 else (len(ends), len(x), weight.size(1))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, ends = ctx.saved_tensors
    if weight.dim() == 3:
        return _loop(gradient, weight.mT, ends), _loop(x.mT, gradient, ends), None
    return _loop(weight, gradient.mT, ends).mT, _loop(x.mT, gradient, ends), None


# Not torch.library.custom_op, which imports torch._dynamo at the first call: seconds.
torch.library.define("colonnade::grouped_mm", "(Tensor x, Tensor weight, Tensor ends) -> Tensor")
torch.library.impl("colonnade::grouped_mm", "CompositeExplicitAutograd", _group_by_group)
torch.library.register_fake("colonnade::grouped_mm", lambda x, weight, ends: x.new_empty(_shape(x, weight, ends)))
torch.library.register_autograd("colonnade::grouped_mm", _gradients, setup_context=_save)


@cache
def _tell(reason: str | None) -> None:
    message = f"experts: torch's grouped_mm takes no product {reason}; they are computed one after another"
    get_dist_logger().warning(message, ranks=[0])
