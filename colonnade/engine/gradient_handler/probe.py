"""Finding out what a handler does: run it once on marked gradients and read the marks.

Each rank fills each gradient with a number that every other rank can compute. After the handler has run,
the value tells over which ranks it was summed and by what it was divided.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import combinations
from math import isclose

import torch

from colonnade.context.layout import Layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.gradient_handler.base import BaseGradientHandler
from colonnade.errors import LedgerError
from colonnade.parallel.demand import Owed, joint_ranks
from colonnade.parallel.dtensor import local_part
from colonnade.reduce.records import Demand, Reduction, group_reductions

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def probe(
    handler: BaseGradientHandler, demands: Sequence[Demand], context: ParallelContext, waived: Callable[[str], bool]
) -> list[Reduction]:
    """The reductions that `handler.handle_gradient()` does. Collective as the handler is; gradients are put back."""
    layout, rank = context.layout, context.get_global_rank()
    kept = [demand.parameter.grad for demand in demands]
    for demand in demands:
        demand.parameter.grad = torch.full_like(demand.parameter, _mark(demand, rank))
    try:
        handler.handle_gradient()
        seen = [demand for demand in demands if not waived(demand.name)]
        found = [(demand, factor) for demand in seen for factor in _read(handler, demand, layout, rank)]
    finally:
        for demand, gradient in zip(demands, kept, strict=True):
            demand.parameter.grad = gradient
    return group_reductions(found)


def _read(handler: BaseGradientHandler, demand: Demand, layout: Layout, rank: int) -> list[Owed]:
    """What happened to one parameter's mark."""
    gradient = demand.parameter.grad
    who = type(handler).__name__
    if gradient is None:
        raise LedgerError(f"{who} set the gradient of {demand.name} to None; a handler changes gradients in place")
    values = local_part(gradient).flatten()
    if values.numel() == 0:
        return []
    value, tolerance = float(values[0]), _TOLERANCE.get(values.dtype, 1e-4)
    mine = _mark(demand, rank)
    if isclose(value, mine, rel_tol=tolerance):
        return []
    for ranks, mode in _rank_sets(demand, layout, rank):
        total = sum(_mark(demand, other) for other in ranks)
        divisor = _divisor(total / value if value else 0.0, tolerance, layout.world_size)
        if divisor is not None:
            return [Owed(mode, ranks, divisor)]  # type: ignore[arg-type]
    raise LedgerError(
        f"{who} changed the gradient of {demand.name} in a way that is no sum over a group of any mode: a mark of "
        f"{mine:.6g} became {value:.6g}. Define covers() on the handler, or name the parameter in "
        f"sync=dict(waive=[...])."
    )


def _rank_sets(demand: Demand, layout: Layout, rank: int) -> list[tuple[tuple[int, ...], ParallelMode]]:
    """Rank sets that a sum may have been taken over: what is owed first, then every group, then this rank alone."""
    sets: dict[tuple[int, ...], ParallelMode] = {}
    for count in range(len(demand.owed), 0, -1):
        for factors in combinations(demand.owed, count):
            sets.setdefault(joint_ranks(layout, demand.placement, factors, rank), factors[0].mode)
    for mode in layout.modes:
        if layout.has(mode, rank):
            sets.setdefault(tuple(layout.group_of(mode, rank)), mode)
    return list(sets.items())


def _divisor(ratio: float, tolerance: float, world_size: int) -> float | None:
    """The whole number (or its inverse: a sum that was counted several times) that a ratio is, if it is one."""
    for whole in range(1, world_size * world_size + 1):
        if isclose(ratio, whole, rel_tol=tolerance):
            return whole
        if isclose(ratio, 1 / whole, rel_tol=tolerance):
            return 1 / whole
    return None


def _mark(demand: Demand, rank: int) -> float:
    """A number in [1, 2), different for each parameter and rank, the same whoever computes it."""
    tied = demand.placement.tied
    key = f"{tied.key if tied is not None else demand.name}:{rank}"
    return 1 + int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") / 2**32
