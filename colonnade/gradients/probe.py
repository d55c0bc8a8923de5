"""The probe: finds the reductions of a handler that calls collectives itself, by running the handler on known gradients.

Each rank fills each gradient with small integers that every other rank can compute, too. After the handler has run, the values show
over which ranks it summed, and which divisor it used (`probe`). The handler may communicate in bf16, fp16 or scaled int8: small
integers survive all of them. If the handler is wrong, ranks may call different collectives and block each other; so collectives
are compared between ranks before they run (`SameCalls`). Afterwards the handler, the RNG streams and the gradients are restored
(`state_put_back`).
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
from colonnade.parallel.placement import local_part

# --- Probe gradients, and the reductions that explain their values -------------------------------------

_RUNS = 4
"""The largest number of runs. A gradient of a single element shows little in one run; about four elements are enough."""
_VALUES = torch.tensor([-3, -2, -1, 1, 2, 3], device="cpu")
"""The values of probe gradients (only +1 and -1 in a world of more than 1024 ranks). Their sums stay near zero: bf16 is exact up
to 256, which is four times the spread of such a sum over 1024 ranks, or of signs over 4096."""
_EXACT, _INT8 = 1e-5, 2 / 127
"""Tolerances, relative to the largest value of such a sum: for fp32; and two steps of int8, since a handler may round before and
after the sum (bf16 is finer)."""


class _ProbeValues:
    """64 integers for each rank and run. The gradient of a parameter repeats some of them, chosen by its name."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._limit = 1 if world_size > 1024 else 3
        self._runs: list[Tensor] = []
        self._sums: dict[tuple[int, ...], Tensor] = {}

    def largest_sum(self, count: int) -> float:
        """A bound of the sum over `count` ranks; over many ranks larger sums are possible, but very unlikely."""
        return self._limit * min(count, 3 * sqrt(count))

    def next_run(self) -> None:
        """Draw new values: a SHA-512 of run and rank. Each rank can compute the values of all ranks."""
        run = len(self._runs)
        rows = [list(sha512(f"{run}:{rank}".encode()).digest()) for rank in range(self._world_size)]
        values = _VALUES[torch.tensor(rows, device="cpu") % len(_VALUES)]
        self._runs.append(values.clamp(-self._limit, self._limit))
        self._sums.clear()

    def of(self, rank: int, columns: Tensor) -> Tensor:
        """The values of one rank in this run."""
        return self._runs[-1][rank, columns]

    def total(self, ranks: tuple[int, ...], columns: Tensor) -> Tensor:
        """The sums over these ranks, for all runs so far."""
        if ranks not in self._sums:
            self._sums[ranks] = torch.stack([values[list(ranks)].sum(0) for values in self._runs]).double()
        return self._sums[ranks][:, columns].flatten()


@dataclass
class _Probed:
    """One parameter: the columns of its probe values, its candidate reductions, and its values after each run."""

    demand: Demand
    columns: Tensor
    candidates: list[_Sum]
    values: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, demand: Demand, layout: Layout, rank: int) -> _Probed:
        """The parameter of `demand`, before the first run."""
        # The columns follow from the name: equal on all ranks, on every machine and in every version of Python.
        digest = sha256((demand.placement.tie_key or demand.name).encode()).digest()
        numel = local_part(demand.parameter).numel()
        columns = torch.tensor(list(digest), device="cpu")[:numel] % sha512().digest_size

        # The candidates, the likeliest first: required reductions (several at once, then single ones), a sum over any other
        # group, no reduction.
        candidates: dict[tuple[int, ...], _Sum] = {}
        for count in range(len(demand.owed), 0, -1):
            for factors in combinations(demand.owed, count):
                ranks = joint_ranks(layout, demand.placement, factors, rank)
                divisor = prod(factor.divisor for factor in factors)
                candidates.setdefault(ranks, _Sum(ranks, factors[0].mode, divisor))
        for mode in layout.modes:
            ranks = tuple(layout.group_of(mode, rank)) if layout.has(mode, rank) else ()
            if len(ranks) > 1:
                candidates.setdefault(ranks, _Sum(ranks, mode, None))
        candidates.setdefault((rank,), _Sum((rank,), None, None))
        return cls(demand, columns, list(candidates.values()))

    @property
    def elements(self) -> int:
        return local_part(self.demand.parameter).numel()


@dataclass(frozen=True)
class _Sum:
    """A reduction that a handler may have made. `divisor`: the required one, None if none is required; mode None: no reduction."""

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
    """Find the reductions that `handler.handle_gradient()` performs. Collective over the world.

    Args:
        handler: The handler. It is run up to four times, and restored.
        demands: The parameters and their required reductions.
        context: The parallel context.
        waived: Returns whether the parameter with a name is exempt from the check: its gradient may be changed in any way.
        touched: Receives the handler's name for each waived parameter whose gradient it changes.

    Raises:
        LedgerError: The handler raises, calls different collectives on different ranks, or changes a gradient in a way that is
            no reduction over a group. Raised on every rank.
    """
    layout, rank = context.layout, context.get_global_rank()
    values = _ProbeValues(layout.world_size)
    probed = [_Probed.of(demand, layout, rank) for demand in demands]

    # All ranks run the handler again until each of them has a single explanation for every parameter.
    checked = [entry for entry in probed if not waived(entry.demand.name)]
    for _ in range(_RUNS):
        values.next_run()
        with agreed_errors(context.device):
            summed = _run(handler, probed, values, context)
            explanations = [_explain(handler, entry, values, rank) for entry in checked]
        for entry in probed if touched is not None else ():
            is_changed = not torch.equal(entry.values[-1], values.of(rank, entry.columns).double())
            if touched is not None and is_changed and waived(entry.demand.name):
                touched[entry.demand.name] = type(handler).__name__
        is_unclear = int(any(len(explanation) > 1 for explanation in explanations))
        unclear = torch.tensor([is_unclear], device=message_device(context.device))
        dist.all_reduce(unclear)
        if not unclear.item():
            break
    likeliest = [first for first, *_ in explanations]

    # A sum that is made twice and divided once looks like a sum that is not divided. The number of elements that went through
    # all-reduces over these ranks tells them apart. It may include gradients of waived parameters, and those that were summed
    # over more ranks in levels, first over these ranks and then over others; so it must exceed all of these, too.
    unchecked = sum(entry.elements for entry in probed) - sum(entry.elements for entry in checked)
    sizes: Counter[_Sum | tuple[int, ...]] = Counter()
    for entry, found in zip(checked, likeliest, strict=True):
        sizes[found] += entry.elements
        sizes[found.ranks] += entry.elements
    pairs: list[tuple[Demand, Owed]] = []
    for entry, found in zip(checked, likeliest, strict=True):
        if found.mode is None:
            continue
        required = next(candidate.divisor for candidate in entry.candidates if candidate.ranks == found.ranks)
        larger = [ranks for ranks in sizes if isinstance(ranks, tuple) and set(ranks) > set(found.ranks)]
        in_levels = sum(max(sizes[ranks] - summed[ranks], 0) for ranks in larger)
        is_twice = summed[found.ranks] >= sizes[found.ranks] + sizes[found] + unchecked + in_levels
        divisors = [found.divisor]
        if is_twice and required is not None and required != found.divisor:
            divisors = [required, found.divisor]
        pairs += [(entry.demand, Owed(found.mode, found.ranks, divisor)) for divisor in divisors]  # type: ignore[arg-type]
    return group_reductions(pairs)


def _run(
    handler: BaseGradientHandler, probed: Sequence[_Probed], values: _ProbeValues, context: ParallelContext
) -> Counter[tuple[int, ...]]:
    """Run the handler on probe gradients and keep the results; returns the number of all-reduced elements by ranks."""
    rank, name = context.get_global_rank(), type(handler).__name__
    before = [(entry.demand.parameter.grad, entry.demand.parameter.requires_grad) for entry in probed]
    with torch.no_grad():
        for entry in probed:
            # A handler may skip frozen parameters; the question is what it does with them once they are trained.
            entry.demand.parameter.requires_grad_(True)
            entry.demand.parameter.grad = gradient = torch.zeros_like(entry.demand.parameter)
            local, own = local_part(gradient), values.of(rank, entry.columns)
            if own.numel():
                repeated = own.to(local).repeat(-(-local.numel() // own.numel()))
                local.copy_(repeated[: local.numel()].view(local.shape))
    try:
        with state_put_back(handler, context), SameCalls(name, rank) as calls:
            handler.handle_gradient()
        for entry in probed:
            changed = entry.demand.parameter.grad
            if changed is None:
                raise LedgerError(
                    f"{name} set the gradient of {entry.demand.name} to None. Change gradients in place in a handler.",
                    code="C042",
                )
            entry.values.append(local_part(changed).flatten()[: len(entry.columns)].double().cpu())
    except ColonnadeError:
        raise
    except Exception as error:
        raise LedgerError(
            f"{name}.handle_gradient() raised {type(error).__name__} on test gradients of small integers: {error}. "
            "If the handler needs other gradients, define covers() on it.",
            code="C042",
        ) from error
    finally:
        for entry, (own_gradient, is_trained) in zip(probed, before, strict=True):
            entry.demand.parameter.grad = own_gradient
            entry.demand.parameter.requires_grad_(is_trained)
    return calls.summed


def _explain(handler: BaseGradientHandler, entry: _Probed, values: _ProbeValues, rank: int) -> list[_Sum]:
    """Every reduction, with its divisor, that gives the values found; the likeliest first."""
    found = torch.cat(entry.values)
    for tolerance in (_EXACT, _INT8):
        explanations = []
        for candidate in entry.candidates:
            total = values.total(candidate.ranks, entry.columns)
            largest = values.largest_sum(len(candidate.ranks))
            divisor = _divisor(found, total, candidate.divisor, tolerance * largest, tolerance == _EXACT)
            if len(candidate.ranks) == 1 and divisor == 1:
                explanations.append(_Sum(candidate.ranks, None, 1))
            elif divisor is not None and candidate.mode is not None:
                explanations.append(_Sum(candidate.ranks, candidate.mode, divisor))
        if explanations:
            return explanations
    own = values.of(rank, entry.columns)[:4].tolist()
    last = [round(value, 4) for value in entry.values[-1][:4].tolist()]
    raise LedgerError(
        f"{type(handler).__name__} changed the gradient of {entry.demand.name}, but the change is not a sum over a "
        f"group of any mode. Its first elements {own} became {last}. Define covers() on the handler, or add the "
        "parameter to sync=dict(waive=[...]).",
        code="C042",
    )


def _divisor(values: Tensor, total: Tensor, required: float | None, tolerance: float, exact: bool) -> float | None:
    """The divisor that turned `total` into `values`: an integer; a fraction 1/n if the sum was taken n times; or None."""
    square = float(total @ total)
    share = float(values @ total) / square if square else 1 / (required or 1)
    if not 0 < share < float("inf"):
        return None
    nearest = round(1 / share) if share <= 1 else 1 / round(share)
    choices = [nearest] if exact or required is None else [required, nearest]
    return next((d for d in choices if bool(((values - total / d).abs() <= tolerance / d).all())), None)


# --- Collectives of the probe, compared between ranks before they run ----------------------------------

_COLLECTIVES = ("all", "barrier", "broadcast", "gather", "reduce", "scatter")
_UNEVEN = ("alltoall", "all_to_all", "barrier", "gather", "scatter")
"""Collectives whose tensors may have another size on each rank."""
_LOOK_EVERY = 0.25  # seconds
_WORKING = {"at": "", "does": "", "size": None, "ended": False, "raised": ""}


class SameCalls(TorchDispatchMode):
    """A block in which a collective runs only after every rank of its group has reached the same collective.

    Different collectives would make torch abort, or wait for half an hour. Each rank publishes its next call in the store of
    the world. A rank that waits for its group checks there whether the others can still arrive, and raises if they cannot.
    Sends and receives are not compared. Collective over the world: every rank enters the block.

    Args:
        name: The class name of the handler, for messages.
        rank: The global rank.
    """

    def __init__(self, name: str, rank: int) -> None:
        super().__init__()
        self.summed: Counter[tuple[int, ...]] = Counter()
        """By ranks, the number of elements that were all-reduced or reduced over them."""
        self._name, self._rank, self._calls = name, rank, Counter[str]()
        turn = default_store().add(f"colonnade/probe/{rank}", 1)
        self._store: Any = PrefixStore(f"colonnade/probe/turn {turn}", default_store())
        self._publish()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor turns the call into collectives on plain tensors, which come here again
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
        raised = str(error).removeprefix(f"{self._name}: ") if isinstance(error, LedgerError) else ""
        does = f"stops with {kind.__name__}: {error}" if error is not None else "ends handle_gradient()"
        self._publish(does=does, ended=True, raised=raised)

    def _publish(self, **state: Any) -> None:
        """Write the state of this rank to the store: the call that it is about to make, in which group; or that it has ended."""
        self._store.set(f"rank/{self._rank}", json.dumps({**_WORKING, "calls": self._calls, **state}))

    def _wait_for_group(self, group: str, ranks: tuple[int, ...], does: str) -> None:
        """Return when every rank of the group has reached this call; raise LedgerError if one cannot reach it."""
        self._calls[group] += 1
        self._publish(at=group, does=does, size=len(ranks))
        # The key has the description of the call, so only ranks with the same call count each other.
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
            texts = self._store.multi_get([f"rank/{other}" for other in range(dist.get_world_size())])
            states = {other: json.loads(text) for other, text in enumerate(texts)}
            problem = find_difference(self._rank, ranks, states, unchanged=states == before)
            if problem is not None:
                raise LedgerError(f"{self._name}: {problem}", code="C042")
            before = states


def find_difference(rank: int, ranks: Sequence[int], states: Mapping[int, Any], unchanged: bool) -> str | None:
    """The reason why the ranks that `rank` waits for will never arrive at its collective; None if they may still arrive.

    Args:
        rank: The waiting rank.
        ranks: The ranks of its call.
        states: The published state of every rank of the world.
        unchanged: No state has changed since the last look, so if every rank waits for another, that is a deadlock.
    """
    own, calls = states[rank], {other: Counter(state["calls"]) for other, state in states.items()}
    group = own["at"]
    number = calls[rank][group]
    missing = [other for other in ranks if calls[other][group] < number]
    here = [other for other in ranks if states[other]["at"] == group and other not in missing]

    # An error that another rank has raised already is repeated, so that all ranks raise the same.
    raised = next((states[other]["raised"] for other in ranks if states[other]["raised"]), None)
    if raised is not None:
        return str(raised)

    def may_proceed(other: int) -> bool:
        """Whether a rank is still working, or all ranks that it waits for have arrived."""
        state = states[other]
        arrived = sum(count[state["at"]] >= calls[other][state["at"]] for count in calls.values())
        return not state["ended"] and (not state["at"] or arrived == state["size"])

    different = [other for other in here if states[other]["does"] != own["does"]]
    ended = [other for other in missing if states[other]["ended"]]
    is_deadlock = unchanged and not any(may_proceed(other) for other in states)
    culprits = different or ended or (missing if is_deadlock else [])
    if not culprits:
        return None
    first, second = sorted([rank, culprits[0]])
    return (
        f"rank {second} {states[second]['does']} where rank {first} {states[first]['does']} (after {number - 1} equal "
        f"calls over these ranks). Let the handler make the same calls on every rank"
    )


# --- Restoring the state of handlers -------------------------------------------------------------------


@contextmanager
def state_put_back(handler: Any, context: ParallelContext) -> Iterator[None]:
    """A context manager: after the block, the attributes of the handler and all RNG streams are restored.

    Tensors (but not parameters), random generators, and dicts, lists, sets, deques and tuples of these are restored in place.
    For other objects (the model, the optimizer, process groups) only the reference is restored.
    """
    put_back = _keep(vars(handler), {})
    streams = random_state(context)
    try:
        yield
    finally:
        put_back()
        set_random_state(streams, context)


def _keep(value: Any, known: dict[int, Any]) -> Callable[[], Any]:
    """A function that restores the present content of `value`. `known`: by id, the objects that have been seen already."""
    if id(value) in known:
        return _nothing
    known[id(value)] = value
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        data, copy = value.data, value.detach().clone()
        # Through `data`, the tensor has its old memory again, even if the handler resized it.
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
    restore_values = [_keep(value, known) for value in values]

    def put_back() -> None:
        if container is not None:
            container.clear()
        fill(content)
        for restore in restore_values:
            restore()

    return put_back


def _nothing(*_: Any) -> None:
    """Restores nothing."""
