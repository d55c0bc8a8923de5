"""Finding out what a handler that sums by hand does: run it once on marked gradients and read the marks.

Each rank fills each gradient with small whole numbers that every other rank can compute. After the handler has run, the
gradients tell over which ranks it summed and by what it divided (`probe`). It may sum in bf16, fp16 or int8: the marks are exact
in all of them. The handler may be wrong, and ranks may then call different collectives, so these are compared before they
run (`SameCalls`). Afterwards the handler, the random streams and the gradients are as they were (`state_put_back`).
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256, sha512
from itertools import combinations
from math import prod, sqrt
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colonnade.comm.messages import agreed_errors, message_device
from colonnade.comm.torch_versions import PrefixStore, default_store, group_of_call
from colonnade.comm.waits import pauses
from colonnade.context.layout import Layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.context.random import random_state, set_random_state
from colonnade.errors import ColonnadeError, LedgerError
from colonnade.gradients.handler import BaseGradientHandler
from colonnade.gradients.sums import Demand, Reduction, group_reductions
from colonnade.parallel.demand import Owed, joint_ranks
from colonnade.parallel.dtensor import local_part

# --- Marks and what became of them ---------------------------------------------------------------------

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
    # SHA-256, as the marks: they follow from a name alone, on every machine and in every version.
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


# --- Collectives of the trial, compared before they run ------------------------------------------------

_COLLECTIVES = ("all", "barrier", "broadcast", "gather", "reduce", "scatter")
_UNEVEN = ("alltoall", "all_to_all", "barrier", "gather", "scatter")
"""Their tensors may have another size on each rank."""
_LOOK_EVERY = 0.25  # seconds
_WORKING = {"at": "", "does": "", "size": None, "ended": False, "raised": ""}


class SameCalls(TorchDispatchMode):
    """Within the block, a collective runs once every rank of its group has come to the same one.

    Where they differ, torch would abort or wait for half an hour. Each rank writes into the store of the world what it
    is about to call. A rank that waits for the others looks there, now and then, whether they can still come.
    Sends and receives are not compared. Collective over the world: every rank enters the block.
    """

    def __init__(self, who: str, rank: int) -> None:
        super().__init__()
        self.summed: Counter[tuple[int, ...]] = Counter()
        """How many elements went through sums over which ranks."""
        self._who, self._rank, self._calls = who, rank, Counter[str]()
        turn = default_store().add(f"colonnade/probe/{rank}", 1)
        self._store: Any = PrefixStore(f"colonnade/probe/turn {turn}", default_store())
        self._publish()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let it become collectives on plain tensors first
        name = re.sub("^all(?=reduce|gather)", "all_", str(getattr(func, "_opname", "")).strip("_"))
        if "c10d" in getattr(func, "namespace", "") and name.startswith(_COLLECTIVES):
            group = group_of_call(args)
            ranks = tuple(dist.get_process_group_ranks(group))
            tensors = [[leaf for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)] for arg in args]
            elements = max(sum(tensor.numel() for tensor in some) for some in tensors)
            if name.startswith(("all_reduce", "reduce")):
                self.summed[ranks] += elements
            size = "" if name.startswith(_UNEVEN) else f" of {elements} element{'s' if elements != 1 else ''}"
            kind = next(str(leaf.dtype).removeprefix("torch.") for some in tensors for leaf in some)
            self._wait_for_group(group.group_name, ranks, f"calls {name}{size} ({kind}) over ranks {list(ranks)}")
        return func(*args, **(kwargs or {}))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        raised = str(error).removeprefix(f"{self._who}: ") if isinstance(error, LedgerError) else ""
        does = f"stops with {kind.__name__}: {error}" if error is not None else "ends handle_gradient()"
        self._publish(does=does, ended=True, raised=raised)

    def _publish(self, **state: Any) -> None:
        """Write to the store what this rank is about to do, and `at` which group, of which `size`; or how it has `ended`."""
        self._store.set(f"rank/{self._rank}", json.dumps({**_WORKING, "calls": self._calls, **state}))

    def _wait_for_group(self, group: str, ranks: tuple[int, ...], does: str) -> None:
        """Return when every rank of the group is here; raise if one cannot come."""
        self._calls[group] += 1
        self._publish(at=group, does=does, size=len(ranks))
        here = f"{group}/{self._calls[group]}/{does}"
        if self._store.add(here, 1) == len(ranks):
            self._store.set(f"{here}/all", "1")
            return
        before: dict[int, Any] = {}
        for pause in pauses(_LOOK_EVERY):
            if self._store.check([f"{here}/all"]):
                return
            sleep(pause)
            if pause < _LOOK_EVERY:
                continue
            states = self._look()
            wrong = find_difference(self._rank, ranks, states, unchanged=states == before)
            if wrong is not None:
                raise LedgerError(f"{self._who}: {wrong}", code="C042")
            before = states

    def _look(self) -> dict[int, Any]:
        names = [f"rank/{rank}" for rank in range(dist.get_world_size())]
        return {rank: json.loads(text) for rank, text in enumerate(self._store.multi_get(names))}


def find_difference(rank: int, ranks: Sequence[int], states: Mapping[int, Any], unchanged: bool) -> str | None:
    """Why `rank`, which waits for the others of `ranks`, waits in vain; None if they may still come.

    `unchanged`: nobody has moved since the last look, so if every rank waits for another, it stays so.
    """
    mine, calls = states[rank], {other: Counter(state["calls"]) for other, state in states.items()}
    group = mine["at"]
    number = calls[rank][group]
    missing = [other for other in ranks if calls[other][group] < number]
    here = [other for other in ranks if states[other]["at"] == group and other not in missing]
    unlike = [other for other in here if states[other]["does"] != mine["does"]]
    ended = [other for other in missing if states[other]["ended"]]
    raised = next((states[other]["raised"] for other in ranks if states[other]["raised"]), None)
    if raised is not None:
        return str(raised)
    stuck = unchanged and not any(_may_proceed(at, states[at], calls) for at in states)
    culprits = unlike or ended or (missing if stuck else [])
    if not culprits:
        return None
    culprit, *_ = culprits
    first, second = sorted([rank, culprit])
    return (
        f"rank {second} {states[second]['does']} where rank {first} {states[first]['does']} (after {number - 1} equal "
        f"calls over these ranks); a handler must do the same on every rank"
    )


def _may_proceed(rank: int, state: Mapping[str, Any], calls: Mapping[int, Counter[str]]) -> bool:
    """Whether it is working, or all ranks that it waits for have come."""
    group = state["at"]
    come = sum(theirs[group] >= calls[rank][group] for theirs in calls.values())
    return not state["ended"] and (not group or come == state["size"])


# --- Everything back as it was -------------------------------------------------------------------------


@contextmanager
def state_put_back(handler: Any, context: ParallelContext) -> Iterator[None]:
    """After the block, the attributes of the handler and all random streams are as they were before it.

    Tensors (but not parameters), random generators, and dicts, lists, sets, deques and tuples of such get their content
    back in place. Of other objects (the model, the optimizer, process groups) only the reference is put back.
    """
    put_back = _keep(vars(handler), {})
    streams = random_state(context)
    try:
        yield
    finally:
        put_back()
        set_random_state(streams, context)


def _keep(value: Any, known: dict[int, Any]) -> Callable[[], Any]:
    """A function that gives `value` the content back that it has now."""
    if id(value) in known:
        return _nothing
    known[id(value)] = value
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        data, copy = value.data, value.detach().clone()
        # Through `data` it is the same memory again, even if the handler gave the tensor another size.
        return lambda: setattr(value, "data", data.copy_(copy))
    if isinstance(value, dict):
        return _refill(value, dict(value), list(value.values()), value.update, known)
    if isinstance(value, (list, deque)):
        return _refill(value, list(value), list(value), value.extend, known)
    if isinstance(value, set):
        return _refill(value, set(value), [], value.update, known)
    if isinstance(value, tuple):
        return _refill(None, value, list(value), _nothing, known)
    return _nothing


def _refill(
    container: Any, content: Any, values: list[Any], fill: Callable[[Any], Any], known: dict[int, Any]
) -> Callable[[], None]:
    inside = [_keep(value, known) for value in values]

    def put_back() -> None:
        if container is not None:
            container.clear()
        fill(content)
        for one in inside:
            one()

    return put_back


def _nothing(*_: Any) -> None:
    """Nothing is to be put back."""
