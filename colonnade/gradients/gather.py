"""Owned slices back to everybody: after a step each rank's slice of the parameters goes to all ranks of its group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.comm.rank_group import GroupMemory, RankGroup
from colonnade.comm.torch_versions import all_gather_flat
from colonnade.gradients.bucket import Bucket, BucketValues
from colonnade.parallel.forward import ModelHook


class Gather:
    """Gathers the parameters of one group; `begin` after each step, `wait` before parameters are read."""

    def __init__(self, group: RankGroup, values: Sequence[BucketValues]) -> None:
        self.group = group
        self.values = list(values)
        self._works: dict[int, Any] = {}
        self._signalled = False
        self._shares_memory = any(one.memory.every is not None for one in self.values)

    def meet(self) -> None:
        """Wait until every rank is here, if ranks write into each other's memory. Collective over the group."""
        if self._shares_memory:
            self.group.exchange(b"m")

    @torch.no_grad()
    def begin(self) -> None:
        """Send this rank's slices; those that the next forward pass needs first go first."""
        for one in reversed(self.values):
            one.publish()
            self._works[id(one)] = send_slice(self.group, one.memory, one.bucket.own)
        if self._shares_memory:
            self.group.signal(b"p")
            self._signalled = True

    def wait(self, values: Iterable[BucketValues] | None = None) -> None:
        """The parameters of these buckets (None: of all) are whole when this returns."""
        if self._signalled:
            self._signalled = False
            self.group.collect()
        for one in self.values if values is None else values:
            if id(one) in self._works:
                work = self._works.pop(id(one))
                if work is not None:
                    work.wait()
                one.copy_out()

    def is_under_way(self, one: BucketValues) -> bool:
        """Whether these parameters may not be whole yet."""
        return id(one) in self._works


def send_slice(group: RankGroup, memory: GroupMemory, own: slice) -> Any:
    """Bring this rank's slice of some memory to all; returns what to wait for.

    Shared memory is written at once, and is whole when every rank has said so.
    """
    mine = memory.own[own]
    if group.alone:
        return None
    if memory.every is None:
        return all_gather_flat(memory.own, mine, group=group.group, async_op=True)
    for index, other in enumerate(memory.every):
        if index != group.index:
            other[own].copy_(mine)
    return None


@torch.no_grad()
def give_back(group: RankGroup, buckets: Sequence[Bucket]) -> None:
    """Bring the final gradients of sharded buckets to every rank, as `.grad`. Collective."""
    works = []
    for bucket in buckets:
        mine = bucket.buffer.flat[bucket.own][: bucket.used]
        if mine.data_ptr() != bucket.gradient.data_ptr():
            mine.copy_(bucket.gradient)
        works.append(send_slice(group, bucket.buffer.memory, bucket.own))
    for work in works:
        if work is not None:
            work.wait()
    if any(bucket.transport.shares_memory for bucket in buckets):
        group.exchange(b"g")
    for bucket in buckets:
        for index, parameter in enumerate(bucket.parameters):
            parameter.grad = None if index in bucket.absent else bucket.grads[index]


class GatherAhead:
    """Lets the gathers run on into the next forward pass: each module waits for the parameters it has itself.

    Only parameters whose module has been called may be late. One that other modules reach for (as in
    `F.linear(x, self.child.weight)`, with no call of the child) would be read before anyone has waited for it, so
    `hold_back` waits for its bucket at once.
    """

    def __init__(self, model: nn.Module, gathers: Sequence[Gather]) -> None:
        self._gathers = list(gathers)
        self._called: set[int] = set()
        place: dict[int, tuple[Gather, BucketValues]] = {}
        for gather in gathers:
            for one in gather.values:
                place.update((id(parameter), (gather, one)) for parameter in one.bucket.parameters)
        for_all = ModelHook(_waiting_for_all(self._gathers))
        self._handles = [
            model.register_state_dict_pre_hook(for_all),
            model.register_load_state_dict_pre_hook(for_all),
        ]
        for module in model.modules():
            mine = {id(p): place[id(p)] for p in module.parameters(recurse=False) if id(p) in place}
            if mine:
                self._handles.append(module.register_forward_pre_hook(ModelHook(_waiting(self._called, mine))))

    def hold_back(self) -> None:
        """After a step: wait for every bucket with a parameter that no call of its module has announced so far."""
        for gather in self._gathers:
            gather.wait([one for one in gather.values if any(id(p) not in self._called for p in one.bucket.parameters)])

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _waiting_for_all(gathers: Sequence[Gather]) -> Any:
    def before(*_: object) -> None:
        for gather in gathers:
            gather.wait()

    return before


def _waiting(called: set[int], mine: Mapping[int, tuple[Gather, BucketValues]]) -> Any:
    # Functions, not methods: a model must not hold on to an engine that nobody uses any more.
    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        called.update(mine)
        for gather, one in mine.values():
            gather.wait([one])

    return before
