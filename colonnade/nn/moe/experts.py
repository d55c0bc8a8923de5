"""Experts: the stacked weights of many small feed-forward networks, split over the expert mode and over tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import LayoutError, listed
from colonnade.logging import get_dist_logger
from colonnade.nn.moe.dispatch import Scope
from colonnade.parallel.collectives import linear_map, split_sizes
from colonnade.parallel.placement import Replicate, Shard, Spec, place

# --- Products of rows that are sorted by expert with the experts' weights: one grouped GEMM, whose sizes stay on the device ---

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


_INNER = {"up": 2, "gate": 2, "up_bias": 1, "down": 1}
"""The dimension of each weight that is the inner one."""


class Experts(nn.Module):
    """`experts` networks hidden -> inner -> hidden, of which each rank of the expert group holds an equal number.

    Dimension 0 of every weight is the expert, placed Shard(0) on EXPERT. Where the tensor ranks do not lie inside the
    expert group they split `inner`: then what `forward` gives is a part, to be summed over the tensor group.
    `gated`: activation(x gate) * (x up) instead of activation(x up).
    """

    up: nn.Parameter
    down: nn.Parameter

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        *,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        gated: bool = False,
        bias: bool = True,
        context: ParallelContext | None = None,
    ) -> None:
        super().__init__()
        self.scope = scope = Scope.of(context)
        if experts % scope.expert:
            raise LayoutError(
                f"{experts} experts cannot lie evenly on the {scope.expert} ranks of parallel.expert; use a multiple of "
                f"{scope.expert} experts, or an expert size among "
                f"{listed(size for size in range(1, experts + 1) if experts % size == 0)}",
                code="C032",
            )
        self.hidden, self.inner, self.experts, self.activation = hidden, inner, experts, activation
        self.splits_inner = scope.tensor > 1 and not scope.shares_tokens
        self._add("up", (hidden, inner), hidden)
        self._add("gate", (hidden, inner), hidden, gated)
        self._add("up_bias", (inner,), hidden, bias)
        self._add("down", (inner, hidden), inner)
        self._add("down_bias", (hidden,), inner, bias)

    def forward(self, rows: Tensor, counts: Tensor | Sequence[int]) -> Tensor:
        """Rows sorted by expert, so many for each expert here -> what the experts make of them, in the same order.

        A tensor of counts stays on the device; what is given back for rows behind the last that is counted means nothing.
        """
        ends = torch.as_tensor(counts, device=rows.device).cumsum(0, dtype=torch.int32)
        rows, weights = self._cast(rows)
        inside, gate = grouped_affine(rows, weights["up"], weights.get("up_bias"), ends), weights.get("gate")
        inside = self.activation(inside) if gate is None else self.activation(grouped_mm(rows, gate, ends)) * inside
        bias = weights.get("down_bias")
        if bias is not None and self.splits_inner:
            bias = bias / self.scope.tensor  # every part has a share of it, and the sum has it once
        out = grouped_affine(inside, weights["down"], bias, ends)
        # A grouped product takes no gradient that was expanded, as that of a sum is.
        return linear_map(out, lambda made: made.view_as(made), lambda gradient: gradient.contiguous())

    def _cast(self, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The rows and the weights, in autocast's dtype where it is on: it does not know grouped products."""
        weights: dict[str, Tensor] = dict(self.named_parameters())
        kind = rows.device.type
        if not torch.is_autocast_enabled(kind) or rows.dtype == torch.float64:
            return rows, weights
        dtype = torch.get_autocast_dtype(kind)
        return rows.to(dtype), {name: weight.to(dtype) for name, weight in weights.items()}

    def _add(self, name: str, shape: tuple[int, ...], inputs: int, wanted: bool = True) -> None:
        """This rank's part of a weight that starts as nn.Linear's do; None where it is not wanted.

        Every rank draws all experts, one at a time, and keeps what is its own: the weights do not depend on the layout.
        """
        if not wanted:
            self.register_parameter(name, None)
            return
        here = self.experts // self.scope.expert
        first = here * self.scope.expert_place
        parts, bound = [], inputs**-0.5
        for at in range(self.experts):
            whole = torch.empty(shape).uniform_(-bound, bound)
            if first <= at < first + here:
                parts.append(self._cut(whole, name).clone())
        parameter = nn.Parameter(torch.stack(parts))
        place(parameter, self._placement(name), (self.experts, *shape))
        self.register_parameter(name, parameter)

    def _placement(self, name: str) -> dict[ParallelMode, Spec]:
        placed: dict[ParallelMode, Spec] = {ParallelMode.EXPERT: Shard(0)} if self.scope.expert > 1 else {}
        if self.splits_inner and name in _INNER:
            placed[ParallelMode.TENSOR] = Shard(_INNER[name])
        elif self.scope.tensor > 1:
            placed[ParallelMode.TENSOR] = Replicate(owes="sum")
        return placed

    def _cut(self, whole: Tensor, name: str) -> Tensor:
        """This tensor rank's part of one expert's weight."""
        if not self.splits_inner or name not in _INNER:
            return whole
        sizes = split_sizes(self.inner, ParallelMode.TENSOR, context=self.scope.context)
        at = self.scope.context.get_local_rank(ParallelMode.TENSOR)
        return whole.narrow(_INNER[name] - 1, sum(sizes[:at]), sizes[at])

    def extra_repr(self) -> str:
        return f"{len(self.up)} of {self.experts} experts, {self.hidden} -> {self.inner} -> {self.hidden}"
