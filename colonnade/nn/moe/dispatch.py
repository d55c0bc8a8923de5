"""Dispatch of tokens to the ranks of their experts and back.

An assignment is a pair of a token and an expert that the router chose for it; a token with k choices has k assignments.
Each assignment is sent as one row. Under expert parallelism the host synchronizes once per layer, for the sizes of the
all-to-all; all other indices stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from colonnade.comm.messages import HostCopy
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import given_or_global
from colonnade.logging import get_dist_logger
from colonnade.parallel.collectives import all_gather, all_to_all, copy, linear_map, reduce


@dataclass(frozen=True)
class Order:
    """The order in which one rank sends its assignments: by expert, then by choice, then by token.

    `rows`: the index of the assignment (choice x tokens + token) that is sent as each row; undefined after the last
    accepted row. `places`: (tokens, choices), the row of each assignment. Dropped assignments have the row `spare`,
    after all accepted rows; `spare` is None if nothing can be dropped.
    """

    rows: Tensor
    places: Tensor
    spare: int | None

    @property
    def tokens(self) -> Tensor:
        """The index of the token that is sent as each row."""
        return self.rows % len(self.places)

    def cut(self, count: int) -> Order:
        """Return the order with only its first `count` rows, the number that the experts accept."""
        if self.spare is None:
            return self
        return Order(self.rows[:count], self.places.clamp(max=count), count)


def order(choices: Tensor, chosen: Tensor, limits: Tensor | None = None) -> Order:
    """Sort the assignments by expert, without synchronizing with the device.

    Args:
        choices: (choices, tokens), the chosen experts.
        chosen: (experts), the number of assignments to each expert.
        limits: (experts), the number of assignments that each expert accepts; later ones are dropped. None: all are accepted.
    """
    experts = choices.flatten()
    row = torch.arange(len(experts), device=experts.device)
    # Radix sort takes fewer passes for fewer bits.
    rows = torch.argsort(experts.to(torch.int16 if len(chosen) < 2**15 else torch.int64), stable=True)
    if limits is None or not len(experts):
        places, spare = torch.empty_like(rows).scatter_(0, rows, row), None
    else:
        sorted_experts, spare = experts[rows], len(experts)
        within = row - (chosen.cumsum(0) - chosen)[sorted_experts]
        row = (limits.cumsum(0) - limits)[sorted_experts] + within
        row = torch.where(within < limits[sorted_experts], row, spare)
        places = torch.empty_like(rows).scatter_(0, rows, row)
        rows = rows.new_zeros(len(rows) + 1).scatter_(0, row, rows)
    return Order(rows, places.view_as(choices).T.contiguous(), spare)


class Traffic:
    """The sizes of the all-to-all. The constructor exchanges them, and the host reads them when it needs them.

    The all-to-all back has the same sizes, reversed. Rows arrive sorted by rank and then by expert; the experts take
    them sorted by expert.
    """

    def __init__(self, counts: Tensor, ranks: int, context: ParallelContext) -> None:
        self._is_simulated = context.is_simulated
        received = all_to_all(counts, ParallelMode.EXPERT, context=context)
        self._arriving = received.view(ranks, -1)
        self._sizes = HostCopy(torch.stack([counts, received]).view(2, ranks, -1).sum(-1))

    def sizes(self, rows: int) -> tuple[list[int], list[int]]:
        """Return (rows to each rank of the expert group, rows from each); `rows` is the largest possible number to send.

        In a simulated world, which has no data, routing is assumed to be balanced and to drop nothing.
        """
        if self._is_simulated:
            ranks = len(self._arriving)
            even = [rows // ranks + (at < rows % ranks) for at in range(ranks)]
            return even, even
        send, receive = self._sizes.read()
        return send, receive

    def by_expert(self, arrived: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Sort the rows that arrived by expert, run the experts, and return their output in the order of arrival."""
        ranks, here = self._arriving.shape
        if ranks == 1 or here == 1:
            return experts(arrived, self._arriving.sum(0))
        there, back = self.turns(len(arrived))
        return permute(experts(permute(arrived, there, back), self._arriving.sum(0)), back, there)

    def experts_of(self, count: int) -> Tensor:
        """Return the index of the local expert of each of the `count` rows that arrived."""
        ranks, here = self._arriving.shape
        local_experts = torch.arange(here, device=self._arriving.device).repeat(ranks)
        return torch.repeat_interleave(local_experts, self._arriving.flatten(), output_size=count)

    def turns(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the permutation of `count` rows from the order of arrival to the order by expert, and its inverse."""
        by_rank, by_expert = self._arriving, self._arriving.T
        ends, turned = _ends(by_rank), _ends(by_expert)
        return _moved(by_expert, turned, ends.T, count), _moved(by_rank, ends, turned.T, count)


def _ends(sizes: Tensor) -> Tensor:
    """The end of each of several consecutive blocks."""
    return sizes.flatten().cumsum(0).view(sizes.shape)


def _moved(sizes: Tensor, ends: Tensor, others: Tensor, count: int) -> Tensor:
    """The new index of each row when blocks that end at `ends` are moved to end at `others`."""
    shifts = torch.repeat_interleave((others - ends).flatten(), sizes.flatten(), output_size=count)
    return torch.arange(count, device=sizes.device) + shifts


def permute(x: Tensor, there: Tensor, back: Tensor) -> Tensor:
    """Return the rows of x in the order `there`: row i of the result is row there[i] of x.

    `back` is the inverse permutation.
    """
    return linear_map(x, lambda rows: rows.index_select(0, there), lambda gradient: permute(gradient, back, there))


def dispatch(x: Tensor, order: Order) -> Tensor:
    """Return the rows to send for tokens (tokens, hidden): each token once for every accepted assignment."""
    return linear_map(x, lambda x: x.index_select(0, order.tokens), partial(_sum_by_token, order=order))


def _sum_by_token(rows: Tensor, order: Order) -> Tensor:
    return linear_map(rows, partial(_sums, order=order, weights=None), partial(dispatch, order=order))


def combine(rows: Tensor, weights: Tensor, order: Order) -> Tensor:
    """Sum the returned rows of each token, weighted by `weights` (tokens, choices); returns (tokens, hidden)."""
    return _Combined.apply(rows, weights, order)


def exchange(
    tokens: Tensor,
    weights: Tensor,
    order: Order,
    traffic: Traffic,
    experts: Callable[[Tensor], Tensor],
    context: ParallelContext,
) -> Tensor:
    """Send tokens to the experts of all ranks, and combine the outputs that come back.

    `experts` computes this rank's experts: it maps the rows that arrived to as many output rows, in the same order.
    Collective over the expert group.
    """
    send, receive = traffic.sizes(order.places.numel())
    order = order.cut(sum(send))
    arrived = all_to_all(dispatch(tokens, order), ParallelMode.EXPERT, send, receive, context=context)
    rows = all_to_all(experts(arrived), ParallelMode.EXPERT, receive, send, context=context)
    return combine(rows, weights.to(rows.dtype), order)


class _Combined(Function):
    """Weighted sums of rows. Memory stays that of the rows, and the backward pass needs no scatter-add."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Order) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.order = order
        return _sums(rows, order, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (rows, weights), order = ctx.saved_tensors, ctx.order
        of_row = weights.T.flatten().index_select(0, order.rows)
        fused = None if torch.is_grad_enabled() else _kernels(rows)
        if fused is not None:
            of_rows, products = fused.row_gradients(gradient, rows, order.tokens, of_row)
        else:
            sent = dispatch(gradient, order)
            of_rows, products = sent * of_row.unsqueeze(1), (rows * sent).sum(-1)
        of_weights = _with_spare(products, order).index_select(0, order.places.flatten()).view_as(weights)
        if order.spare is not None:
            of_weights = of_weights.masked_fill(order.places == order.spare, 0)
        return of_rows, of_weights.to(weights.dtype), None


def _sums(rows: Tensor, order: Order, weights: Tensor | None) -> Tensor:
    fused = _kernels(rows)
    if fused is not None:
        return fused.sums(rows, order.places, weights, order.spare)
    picked = _with_spare(rows, order).index_select(0, order.places.flatten()).view(*order.places.shape, rows.size(1))
    if order.spare is not None:
        picked = picked.masked_fill((order.places == order.spare).unsqueeze(-1), 0)
    return (picked if weights is None else picked * weights.unsqueeze(-1)).sum(1)


def _with_spare(rows: Tensor, order: Order) -> Tensor:
    """The rows with a row for dropped assignments, whose values are not used."""
    return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])]) if order.spare == len(rows) else rows


def _kernels(rows: Tensor) -> Any:
    """The fused Triton kernels for such rows; None if plain operators are used."""
    if torch.compiler.is_compiling() or not rows.is_cuda or rows.dtype == torch.float64:
        return None
    return _triton_kernels()


@cache
def _triton_kernels() -> Any:
    if find_spec("triton") is None:
        get_dist_logger().warning("experts: Triton is not installed, so rows are summed in several passes", ranks=[0])
        return None
    return import_module("colonnade.nn.nn_kernels")


# --- The groups of a mixture of experts ---


@dataclass(frozen=True)
class Scope:
    """The groups of this rank that matter to a mixture of experts. Without groups, all sizes are 1.

    Attributes:
        expert: The size of the expert group.
        expert_place: This rank's index in the expert group.
        tensor: The size of the tensor group, whose ranks have the same tokens.
        shares_tokens: The expert group spans the tensor ranks, which then split the tokens. Otherwise the tensor ranks shard
            the inner features of each expert.
        distinct: The modes whose ranks have different tokens, slowest first.
    """

    context: ParallelContext
    expert: int
    expert_place: int
    tensor: int
    shares_tokens: bool
    distinct: tuple[ParallelMode, ...]

    @staticmethod
    def of(context: ParallelContext | None) -> Scope:
        context = given_or_global(context)
        expert = _ranks(ParallelMode.EXPERT, context)
        same = [axis for axis in context.layout.axes if axis.name == "tensor" and axis.data == "same"]
        tensor = _ranks(ParallelMode.TENSOR, context) if same else []
        distinct = [axis.mode for axis in context.layout.axes if axis.data == "distinct" and axis.size > 1]
        place = expert.index(context.get_global_rank())
        return Scope(context, len(expert), place, len(tensor) or 1, len({*expert} & {*tensor}) > 1, tuple(distinct))

    def summed(self, x: Tensor) -> Tensor:
        """Sum x over all ranks with different tokens of the global batch; gradients flow to the tokens of every rank."""
        if self.shares_tokens:
            # Tensor ranks compute the same loss, which counts once, so backward does not sum over them.
            x = reduce(x, ParallelMode.TENSOR, context=self.context)
        for mode in self.distinct:
            x = copy(reduce(x, mode, context=self.context), mode, context=self.context)
        return x

    def gathered(self, x: Tensor) -> tuple[Tensor, int]:
        """Gather x of all ranks, stacked in the order of their tokens in the global batch.

        Returns (the stack, this rank's index in it).
        """
        modes = [*self.distinct, ParallelMode.TENSOR] if self.shares_tokens else list(self.distinct)
        layout = self.context.layout
        rows, at, stride = x.unsqueeze(0), 0, 1
        for mode in reversed(modes):
            axis = next(axis.name for axis in layout.axes if axis.mode is mode)
            places = [layout.coordinates(rank)[axis] for rank in self.context.get_ranks_in_group(mode)]
            at += stride * places[self.context.get_local_rank(mode)]
            stride *= len(places)
            rows = all_gather(rows, mode, 0, [len(rows)] * len(places), context=self.context)
            if places != sorted(places):  # a custom initializer may order a group differently from the data
                order = sorted(range(len(places)), key=places.__getitem__)
                rows = rows.unflatten(0, (len(places), -1))[order].flatten(0, 1)
        return rows, at

    def __deepcopy__(self, memo: Any) -> Scope:
        """The same object: a copy of a module has the same process groups."""
        return self


def _ranks(mode: ParallelMode, context: ParallelContext) -> list[int]:
    return context.get_ranks_in_group(mode) if context.is_initialized(mode) else [context.get_global_rank()]


def counted(choices: Tensor, experts: int) -> Tensor:
    """Count the occurrences of each expert in each row of (rows, choices), without synchronization.

    Returns (rows, experts).
    """
    counts = torch.zeros(len(choices), experts, dtype=torch.int64, device=choices.device)
    return counts.scatter_add_(1, choices, torch.ones_like(choices))
