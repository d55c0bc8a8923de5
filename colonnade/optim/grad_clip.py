"""Clipping by single values or single units of a parameter, instead of a norm of the whole gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.config.settings import positive
from colonnade.errors import GradientError


@torch.no_grad()
def clip_values_(grads: Iterable[Tensor], limit: float) -> None:
    """Bring every element into [-limit, limit], in place. Needs no communication under any placement."""
    bound = positive("the limit of a value clip", limit)
    tensors = [grad for grad in grads if grad.numel()]
    if any(grad.is_complex() for grad in tensors):
        raise GradientError("a value clip takes real gradients; clip complex ones by their norm")
    if tensors:
        torch._foreach_clamp_min_(tensors, -bound)
        torch._foreach_clamp_max_(tensors, bound)


@dataclass(frozen=True)
class UnitBlock:
    """A local parameter and gradient whose units are its rows (dimension 0), or the whole of a vector.

    `group` has the ranks that hold the other parts of the same units: those over which a dimension other than
    the first is sharded, or any dimension of a vector. None when every unit is whole here.
    """

    param: Tensor
    grad: Tensor
    group: dist.ProcessGroup | None = None


@torch.no_grad()
def clip_units_(blocks: Sequence[UnitBlock], factor: float = 0.01, eps: float = 1e-3) -> None:
    """Adaptive gradient clipping (2102.06171): no unit's gradient norm exceeds `factor` x its weight norm.

    Weight norms count as at least `eps`. One all-reduce per distinct group; every rank of a group must pass
    the blocks of that group in the same order, also those of which it holds no element.
    """
    positive("the factor of a unit clip", factor)
    positive("eps of a unit clip", eps)
    by_group: dict[dist.ProcessGroup | None, list[UnitBlock]] = {}
    for block in blocks:
        by_group.setdefault(block.group, []).append(block)
    for group, members in by_group.items():
        squares = torch.cat([_unit_squares(t) for block in members for t in (block.param, block.grad)])
        if group is not None:
            dist.all_reduce(squares, group=group)
        norms = iter(squares.sqrt().split([_units(b.grad) for b in members for _ in "wg"]))
        for block in members:
            weight, grad = next(norms), next(norms)
            limit = weight.clamp(min=eps) * factor
            scale = torch.fmin(limit / grad, torch.ones_like(grad))  # 1 where a norm is NaN
            block.grad.mul_(scale.view(-1, *[1] * (block.grad.dim() - 1)) if block.grad.dim() else scale.view(()))


def _units(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() > 1 else 1


def _unit_squares(tensor: Tensor) -> Tensor:
    rows = tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(1, -1)
    wide = torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else torch.float32
    return torch.linalg.vector_norm(rows.abs() if rows.is_complex() else rows, dim=1, dtype=wide).square()
