"""Experts: the stacked weights of many small feed-forward networks, split over the expert mode and over tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import LayoutError, listed
from colonnade.nn.moe.grouped import grouped_affine, grouped_mm
from colonnade.nn.moe.scope import Scope
from colonnade.parallel.collectives import linear_map, split_sizes
from colonnade.parallel.placement import Replicate, Shard, Spec, place

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
