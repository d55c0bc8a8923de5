"""The guard of a run: now and then, and before each save, ranks compare what must be alike.

Replicas (weights, and what the optimizer keeps of them) by checksum, over the ranks that hold the same part by placement;
and what gradient handlers have called since the last time. Ranks tell each other digests, on a group that nothing else uses,
so that calls which have fallen out of step are not mixed up with it. Only where digests differ are names exchanged.
"""

from __future__ import annotations

import json
import re
import struct
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.checkpoint.agreement import before_save
from colonnade.comm import waits
from colonnade.comm.messages import gather_bytes, share_texts
from colonnade.comm.torch_versions import default_store, groups_meet, is_alive, timeout_of
from colonnade.config.settings import GuardSettings
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.gradient_sync import GradientSync
from colonnade.errors import GradientError, listed
from colonnade.gradients.probe import CallLog, Steps, first_difference, read_steps
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.held import checksum, held_tensors
from colonnade.texts import digest_of

# --------------------------------------------------------------------------------------------------
# Many numbers as one, for comparisons between ranks.
# --------------------------------------------------------------------------------------------------


def ordered_sum(numbers: Tensor) -> Tensor:
    """One number (of 64 bits, as all of them) that another order gives another of; one changed number always changes it."""
    factors = torch.arange(len(numbers), device=numbers.device) * 0x9E3779B97F4A7C1
    return ((factors ^ factors >> 29 | 1) * numbers).sum()


EVERY = 100
"""Steps between two comparisons, unless the config says otherwise."""
_PART = struct.Struct("<2q")
_NAMED = 8


class _Part(NamedTuple):
    """Something that all ranks which know it must have alike: its key is the same on them, and on no others."""

    key: int
    digest: int


@dataclass(eq=False)
class _Replicas:
    """Tensors that the same ranks hold, of one kind."""

    kind: str
    holders: str
    labels: list[str]
    tensors: list[Tensor]

    @property
    def key(self) -> int:
        return digest_of(f"{self.kind} {self.holders} {self.labels}")


def guard_of(model: nn.Module, optimizer: Any, context: ParallelContext, sync: GradientSync | None) -> Guard | None:
    """The guard that the config asks for, if it does and there is somebody to compare with. Collective over the world."""
    asked = GuardSettings.read(context.config.get("guard"))
    if asked is None or context.world_size == 1 or sync is None:
        return None
    return Guard(model, optimizer, context, sync, asked.every or EVERY)


class Guard:
    """Compares ranks after every `every` steps of an engine, and before its model is saved."""

    def __init__(
        self, model: nn.Module, optimizer: Any, context: ParallelContext, sync: GradientSync, every: int
    ) -> None:
        self._model, self._optimizer, self._context, self._sync = weakref.ref(model), optimizer, context, sync
        self._every, self._steps, self._turns = every, 0, count()
        with groups_meet(context.world_size, "gloo"):
            self._group = dist.new_group(timeout=timeout_of(), backend="gloo")
        self._log = sync.log = CallLog(model.named_parameters, context.waits.at)
        context.waits.details = lambda: self._log.so_far
        before_save[model] = weakref.WeakMethod(self.check)

    def end_step(self) -> None:
        """A step was made. Collective over the world at every `every`-th."""
        self._log.end_step()
        self._steps += 1
        if self._steps % self._every == 0:
            self.check()

    def check(self) -> None:
        """Raise the same error on every rank where ranks differ. Collective over the world."""
        model = self._model()
        if model is None:
            return
        with self._context.waits.during("comparing the ranks"):
            if self._sync.before_pass is not None:
                self._sync.before_pass()  # weights that are still being gathered
            replicas = list(_replicas(model, self._optimizer, self._context))
            everyone = self._exchange([*self._calls(), *_digests(replicas)])
            apart = _apart(everyone)
            if apart:
                raise GradientError(self._explained(apart, replicas), code="C047")
        self._log.forget()

    @property
    def _in_order(self) -> int:
        """The number of steps after which ranks were last found alike."""
        return self._steps - len(self._log.steps)

    def close(self) -> None:
        """Compare no longer."""
        self._sync.log = self._context.waits.details = None
        model = self._model()
        if model is not None:
            before_save.pop(model, None)
        if is_alive(self._group):
            dist.destroy_process_group(self._group)

    # -- what is compared ---------------------------------------------------------------------------------

    def _calls(self) -> Iterator[_Part]:
        """What was called over each group of this rank, in which order its handlers ran, and what is planned."""
        for key, ranks in self._groups().items():
            yield _Part(key, self._log.digests[ranks])
        for ranks, planned in self._planned().items():
            yield _Part(_plan_key(ranks), digest_of(repr([places for places, _ in planned])))

    def _groups(self) -> dict[int, tuple[int, ...] | None]:
        """By key: the sets of ranks over which calls are compared; None: the order of the handlers of a stage."""
        stage = self._context.get_local_rank(ParallelMode.PIPELINE)
        known = [None, *self._context.layout.rank_sets(self._context.get_global_rank()), *self._log.digests]
        return {digest_of(f"handlers {stage}" if ranks is None else f"calls {ranks}"): ranks for ranks in known}

    def _planned(self) -> dict[tuple[int, ...], list[tuple[Any, str]]]:
        """The sums over each group in the order in which they are started: (their places in the plan, names)."""
        found: dict[tuple[int, ...], list[tuple[Any, str]]] = {}
        for bucket in self._sync.synchroniser.buckets:
            places = bucket.positions, bucket.sum.divisor, bucket.sum.labels
            first, *_ = bucket.names
            found.setdefault(bucket.sum.ranks, []).append((places, first))
        return found

    def _exchange(self, mine: list[_Part]) -> list[dict[int, int]]:
        """Every rank's parts, in rank order."""
        self._meet()
        parts = b"".join(_PART.pack(*part) for part in mine)
        rows = gather_bytes(parts, torch.device("cpu"), self._group)  # its group is one of gloo
        return [dict(_PART.iter_unpack(row)) for row in rows]

    def _meet(self) -> None:
        """Return when all ranks are here; raise if one never will be."""
        store, key = default_store(), f"colonnade/guard/{self._group.group_name}/{next(self._turns)}"
        here = store.add(key, 1)
        begin, after = time.monotonic(), 1.5 * waits.SAY_AFTER
        # 20,000 looks a second at most: the more ranks ask one store, the less often each does.
        for pause in waits.pauses(max(0.05, self._context.world_size / 20_000)):
            if here >= self._context.world_size:
                return
            time.sleep(pause)
            here = store.add(key, 0)
            if time.monotonic() - begin > after:
                self._look_for_stuck()
                after = 2 * (time.monotonic() - begin)

    def _look_for_stuck(self) -> None:
        """Raise if a rank stands in a call that needs this rank, which is here and has not made it."""
        here = self._context.get_global_rank()
        for what, rank in waits.stalled_places(here, self._context.world_size).items():
            if here not in _ranks_over(what):
                continue
            place, calls = waits.stalled_details(rank) or ("", None)
            found = _waits_in_vain(here, self._log.steps, place, calls)
            if found is not None:
                step, mine, theirs = found
                raise GradientError(
                    f"rank {rank} is {place} and waits for rank {here}, which has made all its calls of step {self._steps - 1}; "
                    f"they part at step {self._in_order + step}: rank {here} {mine}, rank {rank} {theirs}. {_SAME_CALLS}",
                    code="C043",
                )

    # -- what is said -------------------------------------------------------------------------------------

    def _explained(self, apart: dict[int, dict[int, list[int]]], replicas: list[_Replicas]) -> str:
        """The first difference in calls, or else all replicas that differ, with their ranks."""
        speakers = sorted({ranks[0] for opinions in apart.values() for ranks in opinions.values()})
        mine = {
            "calls": self._log.steps,
            "groups": [*self._groups().items()],
            "planned": {str(_plan_key(ranks)): planned for ranks, planned in self._planned().items()},
            "replicas": {
                str(one.key): [one.kind, one.labels, [checksum(tensor).tolist() for tensor in one.tensors]]
                for one in replicas
                if one.key in apart
            },
        }
        told = {
            rank: json.loads(text)
            for rank, text in share_texts(f"guard/{digest_of(repr(apart))}", json.dumps(mine), speakers).items()
        }
        since = f"after {self._steps} steps (in order after {self._in_order})"
        called = [*_calls_apart(apart, told, self._in_order), *_plans_apart(apart, told)]
        drifted = list(_replicas_apart(apart, told))
        shown = [*called, *drifted][:_NAMED]
        more = (
            f"\n  ... and {len(called) + len(drifted) - len(shown)} more" if len(called) + len(drifted) > _NAMED else ""
        )
        advice = _SAME_CALLS if called else _SAME_REPLICAS
        return f"the ranks have come apart, {since}:\n  " + "\n  ".join(shown) + f"{more}\n{advice}"


_SAME_CALLS = "A handler must make the same calls, in the same order, on every rank of a group; gradients were summed with others."
_SAME_REPLICAS = (
    "Ranks that hold the same part must keep the same bits. Look for weights, gradients or state that one rank writes by "
    "itself after they were summed, and for kernels that give other bits on other machines. Resume from a checkpoint before that."
)


def _plan_key(ranks: tuple[int, ...]) -> int:
    return digest_of(f"planned {ranks}")


def _waits_in_vain(here: int, mine: Steps, place: str, told: Any) -> tuple[int, str, str] | None:
    """Where the calls part of rank `here`, which makes none, and of one that stands at `place` and tells its calls.

    None where it does not wait for `here`, or may wait for a third rank that is late: then all its calls were made here too.
    """
    over = _ranks_over(place)
    if told is None or here not in over:
        return None
    return first_difference(mine, read_steps(told), over, under_way=True)


def _ranks_over(place: str) -> list[int]:
    """The ranks of the call at which a rank stands; none where it stands elsewhere."""
    over = re.search(r" over ranks (\[.*?\])", place)
    return json.loads(over[1]) if over is not None else []


def _apart(everyone: list[dict[int, int]]) -> dict[int, dict[int, list[int]]]:
    """Of each key of which there are several digests: the ranks of each."""
    found: dict[int, dict[int, list[int]]] = {}
    for rank, parts in enumerate(everyone):
        for key, digest in parts.items():
            found.setdefault(key, {}).setdefault(digest, []).append(rank)
    return {key: opinions for key, opinions in found.items() if len(opinions) > 1}


def _calls_apart(apart: dict[int, dict[int, list[int]]], told: dict[int, Any], begin: int) -> Iterator[str]:
    """`begin`: the number of the first step that is told of."""
    steps = {rank: read_steps(said["calls"]) for rank, said in told.items()}
    groups = {key: ranks for said in told.values() for key, ranks in said["groups"]}
    for key, opinions in apart.items():
        first, *others = sorted(opinions.values())
        for other in others if key in groups else ():
            found = first_difference(steps[first[0]], steps[other[0]], groups[key], under_way=False)
            if found is not None:
                step, mine, theirs = found
                over = " (the order of handlers)" if groups[key] is None else f" over ranks {groups[key]}"
                yield f"calls at step {begin + step}{over}: rank {listed(first)} {mine}, rank {listed(other)} {theirs}"


def _plans_apart(apart: dict[int, dict[int, list[int]]], told: dict[int, Any]) -> Iterator[str]:
    for key, opinions in apart.items():
        plans = [(ranks, told[ranks[0]]["planned"].get(str(key))) for ranks in opinions.values()]
        (first, mine), *others = plans
        for other, theirs in others if mine is not None else ():
            ended = None, "another number of sums"
            unlike = ((one, two) for one, two in zip(mine, theirs, strict=False) if one != two)
            (_, one), (_, two) = next(unlike, (ended, ended))
            yield (
                f"the planned sums: rank {listed(first)} starts that of {one!r} where rank {listed(other)} starts that of {two!r}"
            )


def _replicas_apart(apart: dict[int, dict[int, list[int]]], told: dict[int, Any]) -> Iterator[str]:
    for key, opinions in apart.items():
        usual, *others = sorted(opinions.values(), key=lambda ranks: (-len(ranks), ranks))
        known = told[usual[0]]["replicas"].get(str(key))
        for ranks in others if known is not None else ():
            kind, labels, right = known
            *_, theirs = told[ranks[0]]["replicas"][str(key)]
            for label, one, other in zip(labels, right, theirs, strict=True):
                if one != other:
                    yield f"{kind} {label!r}: rank {listed(ranks)} has other bits than rank {listed(usual)}"


# -- replicas ---------------------------------------------------------------------------------------------


def _replicas(model: nn.Module, optimizer: Any, context: ParallelContext) -> Iterator[_Replicas]:
    """Weights by who holds them, and the optimizer's state by who keeps it."""
    weights: dict[Any, _Replicas] = {}
    states: dict[Any, _Replicas] = {}
    for held in sorted(held_tensors(model, context), key=lambda one: one.placement.tie_key):
        if held.holding.count == 1:
            continue
        holders = str(held.holding.ranks)
        whole = weights.setdefault((holders, held.tensor.device), _Replicas("the weights of", holders, [], []))
        whole.labels.append(held.label)
        whole.tensors.append(local_part(held.tensor))
        for name, value in _state_of(optimizer, held.tensor):
            # Counts of steps may lie on the host: by device, or the host would wait for each checksum by itself.
            kept = states.setdefault((holders, value.device), _Replicas("the optimizer's", holders, [], []))
            kept.labels.append(f"{name} of {held.label}")
            kept.tensors.append(value)
    yield from weights.values()
    yield from states.values()


def _state_of(optimizer: Any, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What is kept for a parameter; of a sharded optimizer for this rank's elements, which are part of the name."""
    if hasattr(optimizer, "flat_shard"):
        shard = optimizer.flat_shard(parameter)
        state, where = ({}, "") if shard is None else (shard.state, f"[{shard.start}:{shard.stop}]")
    else:
        state, where = getattr(optimizer, "state", {}).get(parameter, {}), ""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.layout is torch.strided:
            yield f"{name}{where}", local_part(value)


def _digests(replicas: list[_Replicas]) -> list[_Part]:
    """One number for each kind and set of holders; one copy to the host for all of them on a device."""
    mixed = [ordered_sum(torch.cat([checksum(tensor) for tensor in one.tensors])) for one in replicas]
    by_device: dict[torch.device, list[int]] = {}
    for at, number in enumerate(mixed):
        by_device.setdefault(number.device, []).append(at)
    numbers: dict[int, int] = {}
    for places in by_device.values():
        numbers |= zip(places, torch.stack([mixed[at] for at in places]).tolist(), strict=True)
    return [_Part(one.key, numbers[at]) for at, one in enumerate(replicas)]
