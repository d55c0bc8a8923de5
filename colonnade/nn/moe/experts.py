"""`Experts`: stacked weights of many feed-forward networks, sharded over the expert mode and over tensor."""

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

# --- Grouped GEMM: rows sorted by expert times the weights of their experts, with group sizes on the device ---

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16
"""Bytes that the rows of torch's grouped_mm must be multiples of."""
_ONES = 8
"""Columns of ones that a bias is multiplied with: the smallest number that the alignment allows in every dtype."""


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of each group by the group's own matrix.

    ends[i] (int32) is the index after the last row of group i. The result is undefined after the last group. Uses
    torch's grouped_mm or, if that does not support the dtype or the sizes, a loop over the groups, which synchronizes
    with the device for the ends.
    """
    if why_not(x, weight, compiled=torch.compiler.is_compiling()) is None:
        return F.grouped_mm(x, weight, offs=ends)
    return _loop(x, weight, ends)


def grouped_affine(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Return x weight + bias of each group.

    The bias is added by a product with ones, so that its gradient is a product too.
    """
    out = grouped_mm(x, weight, ends)
    if bias is None:
        return out
    ones = x.new_ones(len(x), _ONES)
    return out + grouped_mm(ones, F.pad(bias.unsqueeze(1), (0, 0, 0, _ONES - 1)), ends)


def why_not(x: Tensor, weight: Tensor, *, compiled: bool = False) -> str | None:
    """Return the reason why torch's grouped_mm does not support this product; None if it does."""
    if x.device.type not in ("cpu", "cuda"):
        return f"on {x.device.type}"
    if x.dtype not in _DTYPES:
        return f"of {x.dtype}"
    if compiled and x.dtype != torch.bfloat16:
        return f"of {x.dtype} in compiled code"
    if any(size * x.element_size() % _ALIGNMENT for size in weight.shape[1:]):
        return (
            f"with {x.dtype} weights of {weight.size(1)} x {weight.size(2)}, whose rows are not multiples of 16 bytes"
        )
    return None


def _loop(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """grouped_mm as a custom operator, which compiled code treats as opaque, including its synchronization."""
    return torch.ops.colonnade.grouped_mm(x, weight, ends)


def _grouped_mm_loop(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The products group by group; for gradients also columns x of each group times rows `weight`: (groups, m, n)."""
    if x.is_cuda and weight.dim() == 3:
        _warn_slow(why_not(x, weight) or why_not(x, weight, compiled=True))
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


# Not torch.library.custom_op, which imports torch._dynamo at the first call and takes seconds.
torch.library.define("colonnade::grouped_mm", "(Tensor x, Tensor weight, Tensor ends) -> Tensor")
torch.library.impl("colonnade::grouped_mm", "CompositeExplicitAutograd", _grouped_mm_loop)
torch.library.register_fake("colonnade::grouped_mm", lambda x, weight, ends: x.new_empty(_shape(x, weight, ends)))
torch.library.register_autograd("colonnade::grouped_mm", _gradients, setup_context=_save)


@cache
def _warn_slow(reason: str | None) -> None:
    message = f"experts: torch's grouped_mm does not support products {reason}; experts are computed one after another"
    get_dist_logger().warning(message, ranks=[0])


_INNER = {"up": 2, "gate": 2, "up_bias": 1, "down": 1}
"""The inner dimension of each weight that has one."""


class Experts(nn.Module):
    """Feed-forward networks hidden -> inner -> hidden, with an equal number on each rank of the expert group.

    Dimension 0 of every weight is the expert, placed Shard(0) on EXPERT. If the expert group does not span the tensor
    ranks, these shard `inner`, and the output of `forward` is partial: it must be all-reduced over the tensor group.
    With `gated`, a network computes activation(x gate) * (x up) instead of activation(x up).
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
                f"{experts} experts cannot be sharded evenly over the {scope.expert} ranks of parallel.expert. Use a "
                f"multiple of {scope.expert} experts, or one of the expert sizes "
                f"{listed(size for size in range(1, experts + 1) if experts % size == 0)}.",
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
        """Return the output of this rank's experts.

        Args:
            rows: (rows, hidden), sorted by expert.
            counts: The number of rows of each local expert. A tensor of counts stays on the device; the output is undefined
                for rows after the last counted one.
        """
        ends = torch.as_tensor(counts, device=rows.device).cumsum(0, dtype=torch.int32)
        weights: dict[str, Tensor] = dict(self.named_parameters())
        kind = rows.device.type
        if torch.is_autocast_enabled(kind) and rows.dtype != torch.float64:
            # Autocast does not cover grouped products.
            dtype = torch.get_autocast_dtype(kind)
            rows, weights = rows.to(dtype), {name: weight.to(dtype) for name, weight in weights.items()}
        inner, gate = grouped_affine(rows, weights["up"], weights.get("up_bias"), ends), weights.get("gate")
        inner = self.activation(inner) if gate is None else self.activation(grouped_mm(rows, gate, ends)) * inner
        bias = weights.get("down_bias")
        if bias is not None and self.splits_inner:
            bias = bias / self.scope.tensor  # the all-reduce adds the bias of every tensor rank
        out = grouped_affine(inner, weights["down"], bias, ends)
        # Grouped products reject an expanded gradient, as that of sum().
        return linear_map(out, lambda y: y.view_as(y), lambda gradient: gradient.contiguous())

    def _add(self, name: str, shape: tuple[int, ...], inputs: int, present: bool = True) -> None:
        """Register this rank's shard of a weight, initialized like nn.Linear; None if it is not `present`.

        Every rank draws all experts, one at a time, and keeps its own, so initial weights do not depend on the layout.
        """
        if not present:
            self.register_parameter(name, None)
            return
        scope, is_sharded = self.scope, self.splits_inner and name in _INNER
        here = self.experts // scope.expert
        first = here * scope.expert_place
        shards, bound = [], inputs**-0.5
        for expert in range(self.experts):
            full = torch.empty(shape).uniform_(-bound, bound)
            if not first <= expert < first + here:
                continue
            if is_sharded:
                sizes = split_sizes(self.inner, ParallelMode.TENSOR, context=scope.context)
                at = scope.context.get_local_rank(ParallelMode.TENSOR)
                full = full.narrow(_INNER[name] - 1, sum(sizes[:at]), sizes[at])
            shards.append(full.clone())
        placed: dict[ParallelMode, Spec] = {ParallelMode.EXPERT: Shard(0)} if scope.expert > 1 else {}
        if is_sharded:
            placed[ParallelMode.TENSOR] = Shard(_INNER[name])
        elif scope.tensor > 1:
            # Tensor ranks apply it to their own tokens, or to their own inner features: the gradient is partial.
            placed[ParallelMode.TENSOR] = Replicate(owes="sum")
        parameter = nn.Parameter(torch.stack(shards))
        place(parameter, placed, (self.experts, *shape))
        self.register_parameter(name, parameter)

    def extra_repr(self) -> str:
        return f"{len(self.up)} of {self.experts} experts, {self.hidden} -> {self.inner} -> {self.hidden}"
