"""Dispatch: tokens to the ranks of their experts and back. One exchange of sizes is all that the host waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.nn.moe.router import Routing
from colonnade.parallel.collectives import all_to_all, linear_map


@dataclass(frozen=True)
class Order:
    """The assignments of one rank in the order in which they are sent: by expert, then by choice, then by token.

    `rows`: the assignment (choice x tokens + token) that is sent as each row; what lies behind the last row sent means
    nothing. `places`: (choices, tokens), the row of each assignment; one behind the last for those that are dropped.
    `counts`: the rows of each expert.
    """

    rows: Tensor
    places: Tensor
    counts: Tensor
    drops: bool


def order(routing: Routing) -> Order:
    """Where each assignment goes. Nothing here waits for the device."""
    experts, chosen = routing.experts.flatten(), routing.counts.sum(0)
    kept = chosen if routing.limits is None else routing.limits
    number = torch.arange(len(experts), device=experts.device)
    by_expert = torch.argsort(experts, stable=True)
    sorted_experts = experts[by_expert]
    within = number - (chosen.cumsum(0) - chosen)[sorted_experts]
    row = (kept.cumsum(0) - kept)[sorted_experts] + within
    if routing.limits is not None:
        row = torch.where(within < kept[sorted_experts], row, len(experts))
    places = torch.empty_like(row).scatter_(0, by_expert, row)
    rows = row.new_zeros(len(experts) + 1).scatter_(0, row, by_expert)
    return Order(rows, places.view_as(routing.experts), kept, routing.limits is not None)


@dataclass(frozen=True)
class Traffic:
    """How many rows go where: known to the host, and the same for the way there and the way back."""

    send: list[int]
    """Rows to each rank of the expert group."""
    receive: list[list[int]]
    """Rows from each rank, for each expert here."""

    @staticmethod
    def of(counts: Tensor, ranks: int, context: ParallelContext) -> Traffic:
        """Tell every rank of the expert group how many rows it gets for each of its experts."""
        theirs = all_to_all(counts, ParallelMode.EXPERT, context=context)
        sent, received = torch.stack([counts, theirs]).view(2, ranks, -1).tolist()
        return Traffic([sum(rows) for rows in sent], received)

    @property
    def arrivals(self) -> list[int]:
        """Rows from each rank."""
        return [sum(rows) for rows in self.receive]

    @property
    def per_expert(self) -> list[int]:
        """Rows for each expert here."""
        return [sum(rows) for rows in zip(*self.receive, strict=True)]

    def by_expert(self, x: Tensor) -> Tensor:
        """Rows as they arrived, by rank and then expert -> by expert and then rank."""
        return _turned(x, self.receive)

    def by_rank(self, x: Tensor) -> Tensor:
        """The way back."""
        return _turned(x, [list(rows) for rows in zip(*self.receive, strict=True)])


def _turned(x: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Rows in blocks (i, j) -> rows in blocks (j, i)."""
    if len(sizes) == 1 or len(sizes[0]) == 1:
        return x
    blocks = x.split([size for rows in sizes for size in rows])
    inner = len(sizes[0])
    return torch.cat([blocks[outer * inner + at] for at in range(inner) for outer in range(len(sizes))])


def dispatch(x: Tensor, order: Order, count: int) -> Tensor:
    """(tokens, hidden) -> the `count` rows that are sent: each token once for every assignment that is kept."""
    return linear_map(x, partial(_there, order=order, count=count), partial(combine, order=order, count=count))


def combine(rows: Tensor, order: Order, count: int) -> Tensor:
    """The rows that came back -> (tokens, hidden): for each token the sum of its rows."""
    return linear_map(rows, partial(_back, order=order, count=count), partial(dispatch, order=order, count=count))


def _there(x: Tensor, order: Order, count: int) -> Tensor:
    return x.index_select(0, order.rows[:count] % max(1, order.places.size(1)))


def _back(rows: Tensor, order: Order, count: int) -> Tensor:
    places = order.places
    if order.drops:
        # Dropped assignments read a row of zeros behind the last.
        rows, places = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])]), places.clamp(max=count)
    total = rows.index_select(0, places[0])
    for choice in places[1:]:
        total += rows.index_select(0, choice)
    return total
