"""Dispatch: tokens to the ranks of their experts and back. Where other ranks have experts, the host waits once, for sizes."""

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

from colonnade.comm.host_copy import HostCopy
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import given_or_global
from colonnade.logging import get_dist_logger
from colonnade.parallel.collectives import all_gather, all_to_all, copy, linear_map, reduce


@dataclass(frozen=True)
class Order:
    """The assignments of one rank in the order in which they are sent: by expert, then by choice, then by token.

    `rows`: the assignment (choice x tokens + token) that is sent as each row. What lies behind the last row that an
    expert takes means nothing. `places`: (tokens, choices), the row of each assignment; for those that are dropped it
    is `spare`, behind all rows that an expert takes; None where nothing can be dropped.
    """

    rows: Tensor
    places: Tensor
    spare: int | None

    @property
    def tokens(self) -> Tensor:
        """The token of each row."""
        return self.rows % len(self.places)

    def cut(self, count: int) -> Order:
        """The same where `count` rows are known to be all that the experts take."""
        if self.spare is None:
            return self
        return Order(self.rows[:count], self.places.clamp(max=count), count)


def order(choices: Tensor, chosen: Tensor, limits: Tensor | None = None) -> Order:
    """Where each assignment goes. Nothing here waits for the device.

    `choices`: (choices, tokens), the experts. `chosen`: for each expert, how many assignments chose it. `limits`: how
    many of them it takes, the first ones; None: all.
    """
    experts = choices.flatten()
    row = torch.arange(len(experts), device=experts.device)
    # Few bits are sorted in few passes.
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
    """How many rows go where, asked for at once and read when it is needed: the one number that the host waits for.

    The same for the way there and the way back. Rows arrive by rank and then expert; experts take them by expert.
    """

    def __init__(self, counts: Tensor, ranks: int, context: ParallelContext) -> None:
        self._assumed = context.is_simulated
        theirs = all_to_all(counts, ParallelMode.EXPERT, context=context)
        self._arriving = theirs.view(ranks, -1)
        self._sizes = HostCopy(torch.stack([counts, theirs]).view(2, ranks, -1).sum(-1))

    def sizes(self, rows: int) -> tuple[list[int], list[int]]:
        """(rows to each rank of the expert group, rows from each), of `rows` at most.

        In a simulated world nobody knows: as if all rows went to experts, and to all ranks alike.
        """
        if self._assumed:
            ranks = len(self._arriving)
            even = [rows // ranks + (at < rows % ranks) for at in range(ranks)]
            return even, even
        send, receive = self._sizes.read()
        return send, receive

    def by_expert(self, arrived: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """What the experts make of the rows that arrived, in the order in which they arrived."""
        ranks, here = self._arriving.shape
        if ranks == 1 or here == 1:
            return experts(arrived, self._arriving.sum(0))
        there, back = self.turns(len(arrived))
        return permute(experts(permute(arrived, there, back), self._arriving.sum(0)), back, there)

    def experts_of(self, count: int) -> Tensor:
        """The expert here that each of the `count` rows that arrived is for."""
        ranks, here = self._arriving.shape
        each = torch.arange(here, device=self._arriving.device).repeat(ranks)
        return torch.repeat_interleave(each, self._arriving.flatten(), output_size=count)

    def turns(self, count: int) -> tuple[Tensor, Tensor]:
        """(where each row by expert is among the `count` that arrived, and the other way round)"""
        by_rank, by_expert = self._arriving, self._arriving.T
        ends, turned = _ends(by_rank), _ends(by_expert)
        return _moved(by_expert, turned, ends.T, count), _moved(by_rank, ends, turned.T, count)


def _ends(sizes: Tensor) -> Tensor:
    """Where each block ends, of blocks that lie one after another."""
    return sizes.flatten().cumsum(0).view(sizes.shape)


def _moved(sizes: Tensor, ends: Tensor, others: Tensor, count: int) -> Tensor:
    """For each row of blocks that end at `ends`, where it is when they end at `others`."""
    shifts = torch.repeat_interleave((others - ends).flatten(), sizes.flatten(), output_size=count)
    return torch.arange(count, device=sizes.device) + shifts


def permute(x: Tensor, there: Tensor, back: Tensor) -> Tensor:
    """Row there[i] of x as row i; `back` is the inverse."""
    return linear_map(x, lambda rows: rows.index_select(0, there), lambda gradient: permute(gradient, back, there))


def dispatch(x: Tensor, order: Order) -> Tensor:
    """(tokens, hidden) -> the rows that are sent: each token once for every assignment that is kept."""
    return linear_map(x, lambda x: x.index_select(0, order.tokens), partial(_summed, order=order))


def _summed(rows: Tensor, order: Order) -> Tensor:
    """For each token the sum of its rows."""
    return linear_map(rows, partial(_sums, order=order, weights=None), partial(dispatch, order=order))


def combine(rows: Tensor, weights: Tensor, order: Order) -> Tensor:
    """The rows that came back -> (tokens, hidden): for each token the sum of its rows, weighted: (tokens, choices)."""
    return _Combined.apply(rows, weights, order)


def exchange(
    tokens: Tensor,
    weights: Tensor,
    order: Order,
    traffic: Traffic,
    experts: Callable[[Tensor], Tensor],
    context: ParallelContext,
) -> Tensor:
    """The weighted sums of what the experts of all ranks make of the tokens here; `experts` are those of this rank.

    They take the rows that arrived, and give as many, in the order in which these came.
    """
    send, receive = traffic.sizes(order.places.numel())
    order = order.cut(sum(send))
    there = all_to_all(dispatch(tokens, order), ParallelMode.EXPERT, send, receive, context=context)
    rows = all_to_all(experts(there), ParallelMode.EXPERT, receive, send, context=context)
    return combine(rows, weights.to(rows.dtype), order)


class _Combined(Function):
    """Sums of weighted rows. Nothing larger than the rows is made, and no gradient is added up row by row."""

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
    """With a row for the assignments that are dropped; what it has is not used."""
    return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])]) if order.spare == len(rows) else rows


def _kernels(rows: Tensor) -> Any:
    """What sums such rows in one pass; None where plain operators do."""
    if torch.compiler.is_compiling() or not rows.is_cuda or rows.dtype == torch.float64:
        return None
    return _triton_kernels()


@cache
def _triton_kernels() -> Any:
    if find_spec("triton") is None:
        get_dist_logger().warning("experts: there is no Triton here, so rows are summed in several passes", ranks=[0])
        return None
    return import_module("colonnade.nn.moe.moe_kernels")


# --- Whom a mixture of experts talks to: who holds which experts, who splits them, and whose tokens make one batch ---


@dataclass(frozen=True)
class Scope:
    """The groups of this rank, as a mixture of experts sees them. Without groups it is one process.

    `distinct`: the modes whose ranks have tokens of their own, slowest first. `tensor`: the ranks of the tensor group
    have the same tokens. They split either the inside of each expert or, where the expert group reaches across them
    (`shares_tokens`), the tokens.
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
        """The sum over all tokens of the batch; its gradient reaches the tokens of every rank."""
        if self.shares_tokens:
            # These ranks have one loss between them, so a gradient is that of this loss and not of their sum.
            x = reduce(x, ParallelMode.TENSOR, context=self.context)
        for mode in self.distinct:
            x = copy(reduce(x, mode, context=self.context), mode, context=self.context)
        return x

    def gathered(self, x: Tensor) -> tuple[Tensor, int]:
        """(everybody's x, stacked in the order of their tokens in the batch; this rank's place among them)."""
        modes = [*self.distinct, ParallelMode.TENSOR] if self.shares_tokens else list(self.distinct)
        rows, at, before = x.unsqueeze(0), 0, 1
        for mode in reversed(modes):
            places = self._places(mode)
            at += before * places[self.context.get_local_rank(mode)]
            before *= len(places)
            rows = all_gather(rows, mode, 0, [len(rows)] * len(places), context=self.context)
            if places != sorted(places):  # an initializer's own groups: positions are not the order of the data
                order = sorted(range(len(places)), key=places.__getitem__)
                rows = rows.unflatten(0, (len(places), -1))[order].flatten(0, 1)
        return rows, at

    def _places(self, mode: ParallelMode) -> list[int]:
        """Where the ranks of this rank's group of an axis's mode stand on the axis."""
        name = next(axis.name for axis in self.context.layout.axes if axis.mode is mode)
        return [self.context.layout.coordinates(rank)[name] for rank in self.context.get_ranks_in_group(mode)]

    def __deepcopy__(self, memo: Any) -> Scope:
        """The same: a copy of a module is in the same world."""
        return self


def _ranks(mode: ParallelMode, context: ParallelContext) -> list[int]:
    return context.get_ranks_in_group(mode) if context.is_initialized(mode) else [context.get_global_rank()]


def counted(choices: Tensor, experts: int) -> Tensor:
    """How often each expert occurs in each row of (rows, choices): (rows, experts), without waiting for the device."""
    counts = torch.zeros(len(choices), experts, dtype=torch.int64, device=choices.device)
    return counts.scatter_add_(1, choices, torch.ones_like(choices))
