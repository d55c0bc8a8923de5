"""Whom a mixture of experts talks to: who holds which experts, who splits them, and whose tokens make one batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import given_or_global
from colonnade.parallel.collectives import all_gather, copy, reduce


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
