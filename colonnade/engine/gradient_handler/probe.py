"""Finding out what a handler does: run it once on marked gradients and read the marks.

Each rank fills each gradient with small whole numbers that every other rank can compute. After the handler has run,
they tell over which ranks it summed and by what it divided. It may sum in bf16, fp16 or int8: the marks are exact in
all of them. The handler, its random numbers and the gradients are then as they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256, sha512
from itertools import combinations
from math import prod, sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.comm.messages import agreed_errors, message_device
from colonnade.context.layout import Layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.gradient_handler.base import BaseGradientHandler
from colonnade.engine.gradient_handler.handler_state import state_put_back
from colonnade.engine.gradient_handler.same_calls import SameCalls
from colonnade.errors import ColonnadeError, LedgerError
from colonnade.parallel.demand import Owed, joint_ranks
from colonnade.parallel.dtensor import local_part
from colonnade.reduce.records import Demand, Reduction, group_reductions

_RUNS = 4
"""At most: a gradient of one element tells little in one run. One run is enough from about four elements on."""
_VALUES = torch.tensor([-3, -2, -1, 1, 2, 3], device="cpu")
"""What marks are (only their signs, in a world of more than 1024 ranks). Their sums stay near zero: bf16 is exact to 256,
which is four times the spread of such a sum over 1024 ranks, or of signs over 4096."""
_EXACT, _INT8 = 1e-5, 2 / 127
"""How far a value may be off, as a part of the largest that such a sum can have: in fp32; by two
steps of int8, since a handler may round before the sum and after it (bf16 is finer)."""


class _Marks:
    """64 numbers of each rank for each run. A parameter takes some of them, by its name."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._most = 1 if world_size > 1024 else 3
        self._runs: list[Tensor] = []
        self._sums: dict[tuple[int, ...], Tensor] = {}

    def largest(self, count: int) -> float:
        """What the sum over so many ranks can be: more is possible over many, but not likely."""
        return self._most * min(count, 3 * sqrt(count))

    def next_run(self) -> None:
        run = len(self._runs)
        rows = [list(sha512(f"{run}:{rank}".encode()).digest()) for rank in range(self._world_size)]
        marks = _VALUES[torch.tensor(rows, device="cpu") % len(_VALUES)]
        self._runs.append(marks.clamp(-self._most, self._most))
        self._sums.clear()

    def of(self, rank: int, columns: Tensor) -> Tensor:
        """The marks of one rank in this run."""
        return self._runs[-1][rank, columns]

    def total(self, ranks: tuple[int, ...], columns: Tensor) -> Tensor:
        """The sums over these ranks, of all runs so far."""
        if ranks not in self._sums:
            self._sums[ranks] = torch.stack([marks[list(ranks)].sum(0) for marks in self._runs]).double()
        return self._sums[ranks][:, columns].flatten()


@dataclass
class _Marked:
    """One parameter: which marks it takes, the sums that may be found, and its values after each run."""

    demand: Demand
    columns: Tensor
    sums: list[_Sum]
    values: list[Tensor] = field(default_factory=list)

    @property
    def elements(self) -> int:
        return local_part(self.demand.parameter).numel()


@dataclass(frozen=True)
class _Sum:
    """A sum that a handler may have taken; `divisor` is what is owed, None if nothing is; no mode: no sum at all."""

    ranks: tuple[int, ...]
    mode: ParallelMode | None
    divisor: float | None


def probe(
    handler: BaseGradientHandler,
    demands: Sequence[Demand],
    context: ParallelContext,
    waived: Callable[[str], bool],
    touched: dict[str, str] | None = None,
) -> list[Reduction]:
    """The reductions that `handler.handle_gradient()` does. Collective over the world.

    Into `touched` goes the handler's name for each waived parameter whose gradient it changes, in whatever way.
    """
    layout, rank = context.layout, context.get_global_rank()
    marks = _Marks(layout.world_size)
    marked = [_Marked(demand, _columns(demand), _possible_sums(demand, layout, rank)) for demand in demands]
    seen = [one for one in marked if not waived(one.demand.name)]
    for _ in range(_RUNS):
        marks.next_run()
        with agreed_errors(context.device):
            summed = _run(handler, marked, marks, context)
            answers = [_explain(handler, one, marks, rank) for one in seen]
        if touched is not None:
            changed = [one for one in marked if waived(one.demand.name) and _is_changed(one, marks, rank)]
            touched.update({one.demand.name: type(handler).__name__ for one in changed})
        unclear = torch.tensor([int(any(len(answer) > 1 for answer in answers))], device=message_device(context.device))
        dist.all_reduce(unclear)
        if not unclear.item():
            break
    unseen = sum(one.elements for one in marked) - sum(one.elements for one in seen)
    return group_reductions(_with_repeats(seen, [likeliest for likeliest, *_ in answers], summed, unseen))


def _run(
    handler: BaseGradientHandler, marked: Sequence[_Marked], marks: _Marks, context: ParallelContext
) -> Counter[tuple[int, ...]]:
    """Run the handler on marks and take their values; returns how many elements it summed over which ranks."""
    rank, who = context.get_global_rank(), type(handler).__name__
    kept = [one.demand.parameter.grad for one in marked]
    for one in marked:
        one.demand.parameter.grad = gradient = torch.zeros_like(one.demand.parameter)
        _fill(local_part(gradient), marks.of(rank, one.columns))
    try:
        with state_put_back(handler, context), SameCalls(who, rank) as calls:
            handler.handle_gradient()
        for one in marked:
            changed = one.demand.parameter.grad
            if changed is None:
                raise LedgerError(
                    f"{who} set the gradient of {one.demand.name} to None; a handler changes gradients in place",
                    code="C042",
                )
            one.values.append(local_part(changed).flatten()[: len(one.columns)].double().cpu())
    except ColonnadeError:
        raise
    except Exception as error:
        raise LedgerError(
            f"{who}.handle_gradient() raised {type(error).__name__} on gradients of small whole numbers: {error}. "
            f"Define covers() on the handler if it needs others.",
            code="C042",
        ) from error
    finally:
        for one, before in zip(marked, kept, strict=True):
            one.demand.parameter.grad = before
    return calls.summed


def _columns(demand: Demand) -> Tensor:
    """Which of a rank's 64 marks the gradient repeats: all ranks find the same ones, and each parameter has others."""
    digest = sha256((demand.placement.tie_key or demand.name).encode()).digest()
    return torch.tensor(list(digest), device="cpu")[: local_part(demand.parameter).numel()] % sha512().digest_size


@torch.no_grad()
def _fill(gradient: Tensor, marks: Tensor) -> None:
    if marks.numel():
        repeated = marks.to(gradient).repeat(-(-gradient.numel() // marks.numel()))
        gradient.copy_(repeated[: gradient.numel()].view(gradient.shape))


def _possible_sums(demand: Demand, layout: Layout, rank: int) -> list[_Sum]:
    """What is owed first, then a sum over any group, then none."""
    found: dict[tuple[int, ...], _Sum] = {}
    for count in range(len(demand.owed), 0, -1):
        for factors in combinations(demand.owed, count):
            ranks = joint_ranks(layout, demand.placement, factors, rank)
            found.setdefault(ranks, _Sum(ranks, factors[0].mode, prod(factor.divisor for factor in factors)))
    for mode in layout.modes:
        ranks = tuple(layout.group_of(mode, rank)) if layout.has(mode, rank) else ()
        if len(ranks) > 1:
            found.setdefault(ranks, _Sum(ranks, mode, None))
    found.setdefault((rank,), _Sum((rank,), None, None))
    return list(found.values())


def _explain(handler: BaseGradientHandler, one: _Marked, marks: _Marks, rank: int) -> list[_Sum]:
    """Every sum, with its divisor, that explains what became of the marks; the likeliest first."""
    values = torch.cat(one.values)
    for tolerance in (_EXACT, _INT8):
        found = []
        for possible in one.sums:
            total, largest = marks.total(possible.ranks, one.columns), marks.largest(len(possible.ranks))
            divisor = _divisor(values, total, possible.divisor, tolerance * largest, tolerance == _EXACT)
            if len(possible.ranks) == 1 and divisor == 1:
                found.append(_Sum(possible.ranks, None, 1))
            elif divisor is not None and possible.mode is not None:
                found.append(_Sum(possible.ranks, possible.mode, divisor))
        if found:
            return found
    own, last = marks.of(rank, one.columns)[:4].tolist(), [round(value, 4) for value in one.values[-1][:4].tolist()]
    raise LedgerError(
        f"{type(handler).__name__} changed the gradient of {one.demand.name} in a way that is no sum over a group of "
        f"any mode: its first elements {own} became {last}. Define covers() on the handler, or name the parameter in "
        f"sync=dict(waive=[...]).",
        code="C042",
    )


def _is_changed(one: _Marked, marks: _Marks, rank: int) -> bool:
    return not torch.equal(one.values[-1], marks.of(rank, one.columns).double())


def _divisor(values: Tensor, total: Tensor, due: float | None, tolerance: float, exact: bool) -> float | None:
    """What `total` was divided by to give `values`: a whole number, or one over it (counted several times), or None."""
    square = float(total @ total)
    share = float(values @ total) / square if square else 1 / (due or 1)
    if not 0 < share < float("inf"):
        return None
    nearest = round(1 / share) if share <= 1 else 1 / round(share)
    choices = [nearest] if exact or due is None else [due, nearest]
    return next((d for d in choices if bool(((values - total / d).abs() <= tolerance / d).all())), None)


def _with_repeats(
    seen: Sequence[_Marked], answers: Sequence[_Sum], summed: Counter[tuple[int, ...]], unseen: int
) -> list[tuple[Demand, Owed]]:
    """The sums found, by parameter; one that is done twice stands there twice.

    A sum that is done twice and divided once looks like one that is not divided. How many elements went through sums
    over these ranks tells them apart (`unseen`: elements of gradients that were not looked at, and may be among them).
    Among them may also be those of a sum over more ranks that was taken in levels, first over these and then over others.
    """
    sizes: Counter[_Sum | tuple[int, ...]] = Counter()
    for one, answer in zip(seen, answers, strict=True):
        sizes[answer] += one.elements
        sizes[answer.ranks] += one.elements
    found: list[tuple[Demand, Owed]] = []
    for one, answer in zip(seen, answers, strict=True):
        if answer.mode is None:
            continue
        due = next(possible.divisor for possible in one.sums if possible.ranks == answer.ranks)
        larger = [ranks for ranks in sizes if isinstance(ranks, tuple) and set(ranks) > set(answer.ranks)]
        levels = sum(max(sizes[ranks] - summed[ranks], 0) for ranks in larger)
        twice = summed[answer.ranks] >= sizes[answer.ranks] + sizes[answer] + unseen + levels
        divisors = [due, answer.divisor] if due is not None and due != answer.divisor and twice else [answer.divisor]
        found += [(one.demand, Owed(answer.mode, answer.ranks, divisor)) for divisor in divisors]  # type: ignore[arg-type]
    return found
