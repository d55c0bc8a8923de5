"""The guard (config key `guard`): every n steps, and before each save, ranks compare their replicas and their collective calls.

The guard finds two silent mistakes:

- replicas that diverge: weights and optimizer state are compared by checksum between the ranks that store the same shard;
- handlers that call collectives in a different order on some ranks, so that gradients of different parameters are added up:
  `CallLog` records the calls of each handler, and the records are compared.

Ranks exchange digests, and names only if digests differ. They use a separate process group, because collectives on the usual groups
may not match. Before a comparison they wait for each other in the store, so that a rank that is stuck in a collective is reported.
"""

from __future__ import annotations

import json
import re
import struct
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colonnade.checkpoint.save import save_checks
from colonnade.comm import waits
from colonnade.comm.messages import gather_bytes, share_texts
from colonnade.comm.torch_versions import default_store, groups_meet, is_alive, noting_collectives, timeout_of
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.checks import ordered_sum
from colonnade.engine.gradient_sync import GradientSync
from colonnade.errors import GradientError, listed
from colonnade.gradients.handler import BaseGradientHandler, PlannedGradientHandler
from colonnade.parallel.flat import ShardedOptimizer
from colonnade.parallel.held import checksum, held_tensors
from colonnade.parallel.placement import local_part
from colonnade.texts import digest_of

EVERY = 100
"""Steps between two comparisons, by default."""
_PART = struct.Struct("<2q")
_NAMED = 8


class _Part(NamedTuple):
    """A digest that must be equal on all ranks with this key; ranks that need not agree have different keys."""

    key: int
    digest: int


@dataclass(eq=False)
class _Replicas:
    """Tensors of one kind ("the weights of", "the optimizer's") that are stored by the same ranks."""

    kind: str
    ranks: str
    labels: list[str]
    tensors: list[Tensor]

    @property
    def key(self) -> int:
        return digest_of(f"{self.kind} {self.ranks} {self.labels}")


class Guard:
    """Compares all ranks after every `every` steps of an engine, and before its model is saved."""

    def __init__(
        self, model: nn.Module, optimizer: Any, context: ParallelContext, sync: GradientSync, every: int
    ) -> None:
        self._model, self._optimizer, self._context, self._sync = weakref.ref(model), optimizer, context, sync
        self._every, self._steps, self._turns = every, 0, count()
        # A group of its own: on the usual ones a comparison could pair with the very calls that are out of step.
        with groups_meet(context.world_size, "gloo"):
            self._group = dist.new_group(timeout=timeout_of(), backend="gloo")
        self._log = sync.log = CallLog(model.named_parameters, context.waits.at)
        # A rank that waits in a call publishes its calls, for a rank that has come to the comparison without it (`_meet`).
        context.waits.details = lambda: self._log.so_far
        # A checkpoint of diverged replicas must not replace a good one.
        save_checks[model] = weakref.WeakMethod(self.check)

    def end_step(self) -> None:
        """Count a step, and compare the ranks at every `every`-th step. Then the call is collective over the world."""
        self._log.end_step()
        self._steps += 1
        if self._steps % self._every == 0:
            self.check()

    def check(self) -> None:
        """Raise the same error on every rank if ranks differ. Collective over the world."""
        model = self._model()
        if model is None:
            return
        with self._context.waits.during("comparing the ranks"):
            self._sync.before_pass()  # wait for all-gathers of weights that still run
            replicas = list(_replicas(model, self._optimizer, self._context))

            # One digest for each kind of tensor and set of ranks, with one copy to the host per device.
            sums = [ordered_sum(torch.cat([checksum(tensor) for tensor in part.tensors])) for part in replicas]
            by_device: dict[torch.device, list[int]] = {}
            for at, number in enumerate(sums):
                by_device.setdefault(number.device, []).append(at)
            digests: dict[int, int] = {}
            for places in by_device.values():
                digests |= zip(places, torch.stack([sums[at] for at in places]).tolist(), strict=True)
            parts = [*self._calls(), *(_Part(part.key, digests[at]) for at, part in enumerate(replicas))]

            # Only when all ranks are here: a rank that is stuck elsewhere would never come to the collective.
            self._meet()
            packed = b"".join(_PART.pack(*part) for part in parts)
            rows = gather_bytes(packed, torch.device("cpu"), self._group)
            apart = _apart([dict(_PART.iter_unpack(row)) for row in rows])
            if apart:
                raise GradientError(self._explained(apart, replicas), code="C047")
        self._log.forget()

    @property
    def _in_order(self) -> int:
        """The number of steps after which the last comparison found no difference."""
        return self._steps - len(self._log.steps)

    def close(self) -> None:
        """Stop comparing, and destroy the process group."""
        self._sync.log = self._context.waits.details = None
        model = self._model()
        if model is not None:
            save_checks.pop(model, None)
        if is_alive(self._group):
            dist.destroy_process_group(self._group)

    # -- facts that are compared --------------------------------------------------------------------------

    def _calls(self) -> Iterator[_Part]:
        """Digests of three things: the calls over each group of this rank, the order of its handlers, and the planned
        reductions.
        """
        for key, ranks in self._groups().items():
            yield _Part(key, self._log.digests[ranks])
        for ranks, planned in self._planned().items():
            yield _Part(_plan_key(ranks), digest_of(repr([places for places, _ in planned])))

    def _groups(self) -> dict[int, tuple[int, ...] | None]:
        """The sets of ranks over which calls are compared, by key; None stands for the order of handlers in a stage."""
        stage = self._context.get_local_rank(ParallelMode.PIPELINE)
        known = [None, *self._context.layout.rank_sets(self._context.get_global_rank()), *self._log.digests]
        return {digest_of(f"handlers {stage}" if ranks is None else f"calls {ranks}"): ranks for ranks in known}

    def _planned(self) -> dict[tuple[int, ...], list[tuple[Any, str]]]:
        """The reductions over each group in their order: (positions in the plan, name of the first parameter)."""
        found: dict[tuple[int, ...], list[tuple[Any, str]]] = {}
        for bucket in self._sync.synchroniser.buckets:
            places = bucket.positions, bucket.sum.divisor, bucket.sum.labels
            first, *_ = bucket.names
            found.setdefault(bucket.sum.ranks, []).append((places, first))
        return found

    def _meet(self) -> None:
        """Wait for all ranks. Raise if a rank is stuck in a call that needs this rank, which is here and did not make it."""
        here, world_size = self._context.get_global_rank(), self._context.world_size
        store, key = default_store(), f"colonnade/guard/{self._group.group_name}/{next(self._turns)}"
        arrived = store.add(key, 1)
        begin, after = time.monotonic(), 1.5 * waits.PUBLISH_AFTER
        # At most 20,000 polls a second reach the store: the more ranks there are, the less often each of them polls.
        for pause in waits.pauses(max(0.05, world_size / 20_000)):
            if arrived >= world_size:
                return
            time.sleep(pause)
            arrived = store.add(key, 0)
            if time.monotonic() - begin > after:
                for stalled_at, rank in waits.places_of_stalled_ranks(here, world_size).items():
                    if here not in _ranks_over(stalled_at):
                        continue
                    place, calls = waits.stalled_details(rank) or ("", None)
                    found = _waits_in_vain(here, self._log.steps, place, calls)
                    if found is not None:
                        step, own, other = found
                        raise GradientError(
                            f"rank {rank} is {place} and waits for rank {here}, but rank {here} has completed all "
                            f"its calls of step {self._steps - 1}. The calls of the two ranks differ from step "
                            f"{self._in_order + step} on: rank {here} {own}, rank {rank} {other}. {_SAME_CALLS}",
                            code="C043",
                        )
                after = 2 * (time.monotonic() - begin)

    # -- the message --------------------------------------------------------------------------------------

    def _explained(self, apart: dict[int, dict[int, list[int]]], replicas: list[_Replicas]) -> str:
        """The first differences in calls and all differing replicas, with their ranks. Collective over the world."""
        # One rank of each opinion sends its names; digests were enough to know which ranks these are.
        senders = sorted({ranks[0] for opinions in apart.values() for ranks in opinions.values()})
        report = {
            "calls": self._log.steps,
            "groups": [*self._groups().items()],
            "planned": {str(_plan_key(ranks)): planned for ranks, planned in self._planned().items()},
            "replicas": {
                str(part.key): [part.kind, part.labels, [checksum(tensor).tolist() for tensor in part.tensors]]
                for part in replicas
                if part.key in apart
            },
        }
        texts = share_texts(f"guard/{digest_of(repr(apart))}", json.dumps(report), senders)
        reports = {rank: json.loads(text) for rank, text in texts.items()}
        calls = [*_calls_apart(apart, reports, self._in_order), *_plans_apart(apart, reports)]
        lines = [*calls, *_replicas_apart(apart, reports)]
        more = f"\n  ... and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
        return (
            f"the ranks have diverged after {self._steps} steps. They last agreed after {self._in_order} steps.\n  "
            + "\n  ".join(lines[:_NAMED])
            + f"{more}\n{_SAME_CALLS if calls else _SAME_REPLICAS}"
        )


_SAME_CALLS = (
    "A handler must call the same collectives, in the same order, on every rank of a group; gradients of different parameters "
    "were added up."
)
_SAME_REPLICAS = (
    "Ranks that store the same shard must have the same bits. Look for weights, gradients or state that only some ranks change "
    "after the reduction, and for kernels that round differently on different machines. Resume from an earlier checkpoint."
)


def _plan_key(ranks: tuple[int, ...]) -> int:
    return digest_of(f"planned {ranks}")


def _waits_in_vain(here: int, steps: Steps, place: str, calls: Any) -> tuple[int, str, str] | None:
    """The first difference between the calls of rank `here` and the `calls` of a rank that is stuck at `place`.

    None if the stuck rank does not wait for `here`, or if `here` made the same calls: then it may wait for a third
    rank.
    """
    over = _ranks_over(place)
    if calls is None or here not in over:
        return None
    return first_difference(steps, read_steps(calls), over, under_way=True)


def _ranks_over(place: str) -> list[int]:
    """The ranks of the collective named in the position of a rank; empty if the position is no collective."""
    over = re.search(r" over ranks (\[.*?\])", place)
    return json.loads(over[1]) if over is not None else []


def _apart(parts_by_rank: list[dict[int, int]]) -> dict[int, dict[int, list[int]]]:
    """The keys with several digests: for each digest ("opinion"), the ranks that have it."""
    found: dict[int, dict[int, list[int]]] = {}
    for rank, parts in enumerate(parts_by_rank):
        for key, digest in parts.items():
            found.setdefault(key, {}).setdefault(digest, []).append(rank)
    return {key: opinions for key, opinions in found.items() if len(opinions) > 1}


def _calls_apart(apart: dict[int, dict[int, list[int]]], reports: dict[int, Any], begin: int) -> Iterator[str]:
    """A line for each difference in calls. `begin`: the number of the first step in the reports."""
    steps = {rank: read_steps(report["calls"]) for rank, report in reports.items()}
    groups = {key: ranks for report in reports.values() for key, ranks in report["groups"]}
    for key, opinions in apart.items():
        first, *others = sorted(opinions.values())
        for other in others if key in groups else ():
            found = first_difference(steps[first[0]], steps[other[0]], groups[key], under_way=False)
            if found is not None:
                step, left, right = found
                over = " (the order of handlers)" if groups[key] is None else f" over ranks {groups[key]}"
                yield f"calls at step {begin + step}{over}: rank {listed(first)} {left}, rank {listed(other)} {right}"


def _plans_apart(apart: dict[int, dict[int, list[int]]], reports: dict[int, Any]) -> Iterator[str]:
    """A line for each difference in the order of planned reductions."""
    for key, opinions in apart.items():
        plans = [(ranks, reports[ranks[0]]["planned"].get(str(key))) for ranks in opinions.values()]
        (first, plan), *others = plans
        for other, other_plan in others if plan is not None else ():
            ended = None, "a different number of reductions"
            differing = ((left, right) for left, right in zip(plan, other_plan, strict=False) if left != right)
            (_, left), (_, right) = next(differing, (ended, ended))
            yield (
                f"the planned reductions differ: rank {listed(first)} starts the reduction of {left!r}, but rank "
                f"{listed(other)} starts the reduction of {right!r} at the same place"
            )


def _replicas_apart(apart: dict[int, dict[int, list[int]]], reports: dict[int, Any]) -> Iterator[str]:
    """A line for each tensor in which replicas differ. The value of most ranks is taken as the correct one."""
    for key, opinions in apart.items():
        majority, *others = sorted(opinions.values(), key=lambda ranks: (-len(ranks), ranks))
        known = reports[majority[0]]["replicas"].get(str(key))
        for ranks in others if known is not None else ():
            kind, labels, sums = known
            *_, other_sums = reports[ranks[0]]["replicas"][str(key)]
            for label, expected, found in zip(labels, sums, other_sums, strict=True):
                if expected != found:
                    yield f"{kind} {label!r}: rank {listed(ranks)} differs bitwise from rank {listed(majority)}"


# -- replicas ---------------------------------------------------------------------------------------------


def _replicas(model: nn.Module, optimizer: Any, context: ParallelContext) -> Iterator[_Replicas]:
    """Weights and optimizer state that several ranks store, by these ranks."""
    weights: dict[Any, _Replicas] = {}
    states: dict[Any, _Replicas] = {}
    for held in sorted(held_tensors(model, context), key=lambda entry: entry.placement.tie_key):
        # A tensor that only this rank stores has no replica to compare with.
        if held.holding.count == 1:
            continue
        ranks = str(held.holding.ranks)
        weight = weights.setdefault((ranks, held.tensor.device), _Replicas("the weights of", ranks, [], []))
        weight.labels.append(held.label)
        weight.tensors.append(local_part(held.tensor))
        for name, value in _state_of(optimizer, held.tensor):
            # Step counts may be on the host. Grouped by device, or the host would wait for each checksum separately.
            state = states.setdefault((ranks, value.device), _Replicas("the optimizer's", ranks, [], []))
            state.labels.append(f"{name} of {held.label}")
            state.tensors.append(value)
    yield from weights.values()
    yield from states.values()


def _state_of(optimizer: Any, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The optimizer state of a parameter, by name.

    A sharded optimizer has only the state of this rank's slice, and the name contains the slice.
    """
    if isinstance(optimizer, ShardedOptimizer):
        shard = optimizer.flat_shard(parameter)
        state, where = ({}, "") if shard is None else (shard.state, f"[{shard.start}:{shard.stop}]")
    else:
        state, where = getattr(optimizer, "state", {}).get(parameter, {}), ""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.layout is torch.strided:
            yield f"{name}{where}", local_part(value)


# -- calls of handlers ------------------------------------------------------------------------------------

Entry = tuple[str, str, tuple[int, ...]]
"""(handler, its call, ranks of the call); without ranks: the start of the handler, or its planned reductions."""
Steps = list[tuple[Entry, ...]]
"""The calls of each step."""

_PLANNED = "runs its planned reductions"


class CallLog:
    """Runs gradient handlers and records the collectives that they call.

    `at` is called before each collective, with its position as text.
    """

    def __init__(self, named: Callable[[], Iterable[tuple[str, nn.Parameter]]], at: Callable[[str], None]) -> None:
        self._named, self._at = named, at
        self._entries: list[Entry] = []
        self._known: dict[tuple[Entry, ...], tuple[tuple[Entry, ...], dict[Any, int]]] = {}
        self._names: dict[int, str] = {}
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._texts: dict[Any, tuple[Entry, str] | None] = {}
        """Cache of the entries by call, since a step may make hundreds of calls."""
        self.steps: Steps = []
        """The calls of each step since `forget`."""
        self.digests: Counter[tuple[int, ...] | None] = Counter()
        """A digest of all calls so far over each set of ranks; under None, of the order in which handlers ran."""

    def run(self, handler: BaseGradientHandler) -> None:
        """Run a handler for one step."""
        name = type(handler).__name__
        # The reductions of a planned handler are compared as a plan (`Guard._planned`): one entry keeps the order of handlers.
        if isinstance(handler, PlannedGradientHandler):
            self._entries.append((name, _PLANNED, ()))
            handler.handle_gradient()
            return
        self._entries.append((name, "begins", ()))
        self._names = {}
        with noting_collectives(partial(self._note, name)):
            handler.handle_gradient()
        self._at("summing the gradients")

    def end_step(self) -> None:
        """End a step, in which either all handlers or no handlers have run."""
        called, self._entries = tuple(self._entries), []
        if called not in self._known:
            by_ranks: dict[tuple[int, ...] | None, list[Entry]] = {None: []}
            for entry in called:
                *_, over = entry
                by_ranks.setdefault(over or None, []).append(entry)
            self._known[called] = called, {over: digest_of(repr(entries)) for over, entries in by_ranks.items()}
        called, digests = self._known[called]  # the same object for all equal steps, to save memory
        for ranks, digest in digests.items():
            self.digests[ranks] = digest_of(f"{self.digests[ranks]} {digest}")
        self.steps.append(called)

    def forget(self) -> None:
        """Drop the recorded steps, after a comparison without differences."""
        self.steps.clear()
        self._known.clear()
        self._texts.clear()

    @property
    def so_far(self) -> Steps:
        """The recorded steps and the current, incomplete step."""
        return [*self.steps, tuple(self._entries)]

    def _note(self, handler: str, name: str, group: Any, given: Any) -> None:
        """Record a collective that a handler is about to call."""
        # The parameter is recognised by the memory of its gradient.
        if not self._names:
            self._parameters = self._parameters or list(self._named())
            gradients = ((label, p.grad) for label, p in self._parameters if p.grad is not None)
            self._names = {local_part(grad).data_ptr(): label for label, grad in gradients if not grad.is_sparse}
        match given:
            case [Tensor()]:  # an all_reduce, the usual case; flattening other arguments takes longer than all the rest
                tensors = given
            case _:
                tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        found: Any = next((self._names[place] for t in tensors if (place := t.data_ptr()) in self._names), None)
        key = handler, name, group, sum(t.numel() for t in tensors) if found is None else found
        if key not in self._texts:
            self._texts[key] = _noted(*key)
        if (noted := self._texts[key]) is not None:
            entry, at = noted
            self._entries.append(entry)
            self._at(at)


def _noted(handler: str, name: str, group: Any, of: str | int) -> tuple[Entry, str] | None:
    """The recorded entry of a call, and the position of the rank during the call as text; None for a group of one rank."""
    ranks = tuple(dist.get_process_group_ranks(group))
    what = f"of {of!r}" if isinstance(of, str) else f"of {of} elements"
    at = f"in {handler}, at {name} {what} over ranks {list(ranks)}"
    return ((handler, f"{name} {what}", ranks), at) if len(ranks) > 1 else None


def first_difference(
    one: Steps, other: Steps, ranks: Sequence[int] | None, *, under_way: bool
) -> tuple[int, str, str] | None:
    """The first difference between the calls of two ranks over the group `ranks`, as (step, call of the first rank, call of the
    second rank); None if equal.

    With `ranks=None` the order of handlers is compared. `under_way`: whether the other rank may make further calls in its last
    step.
    """
    wanted = tuple(ranks or ())
    for step, both in enumerate(zip(one, other, strict=False)):
        left, right = ([entry for *entry, over in called if over == wanted] for called in both)
        # What the other rank has not called yet in its unfinished step is no difference.
        if under_way and step + 1 == len(other):
            left = left[: len(right)]
        for at, (entry, other_entry) in enumerate(zip_longest(left, right)):
            if entry != other_entry:
                return step, _text_of(entry, at), _text_of(other_entry, at)
    return None


def read_steps(steps: Any) -> Steps:
    """Convert recorded steps from their JSON form."""
    return [tuple((handler, call, tuple(ranks)) for handler, call, ranks in called) for called in steps]


def _text_of(entry: Sequence[str] | None, at: int) -> str:
    if entry is None:
        return f"makes no further call after {at}"
    handler, call = entry
    return f"{handler} {call}" if call in ("begins", _PLANNED) else f"{handler} calls {call}"
