"""All-gathers of owned slices: of parameters after an optimizer step (ZeRO 1 and 2), and of reduced gradients.

`Gather` all-gathers the parameters of one group of ranks; `GatherAhead` overlaps these all-gathers with the next forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.comm.groups import GroupMemory, RankGroup
from colonnade.comm.torch_versions import all_gather_flat
from colonnade.gradients.bucket import Bucket, BucketValues
from colonnade.parallel.forward import ModelHook


class Gather:
    """All-gathers the parameters of one group of ranks. Call `begin` after each step, and `wait` before parameters are read."""

    def __init__(self, group: RankGroup, values: Sequence[BucketValues]) -> None:
        self.group = group
        self.values = list(values)
        self._works: dict[int, Any] = {}
        self._signalled = False
        self._shares_memory = any(each.memory.every is not None for each in self.values)

    def meet(self) -> None:
        """Wait until every rank of the group has called this method, if ranks write into each other's memory.

        Collective over the group.
        """
        if self._shares_memory:
            self.group.exchange(b"m")

    @torch.no_grad()
    def begin(self) -> None:
        """Send this rank's slices. Collective over the group."""
        # Buckets are in reverse model order, so the last has the parameters that the next forward pass needs first.
        for values in reversed(self.values):
            values.publish()
            self._works[id(values)] = send_slice(self.group, values.memory, values.bucket.own)
        if self._shares_memory:
            self.group.signal(b"p")
            self._signalled = True

    def wait(self, values: Iterable[BucketValues] | None = None) -> None:
        """Wait until the parameters of the given buckets (None: of all buckets) are complete."""
        # One signal per rank stands for all its slices in shared memory.
        if self._signalled:
            self._signalled = False
            self.group.collect()
        for of_bucket in self.values if values is None else values:
            if id(of_bucket) in self._works:
                work = self._works.pop(id(of_bucket))
                if work is not None:
                    work.wait()
                of_bucket.copy_out()

    def is_under_way(self, values: BucketValues) -> bool:
        """Whether the all-gather of these parameters was started, and `wait` was not called for it."""
        return id(values) in self._works


def send_slice(group: RankGroup, memory: GroupMemory, own: slice) -> Any:
    """Send this rank's slice of `memory` to all ranks of the group. Returns the `Work` object to wait for, or None.

    Without a `Work` object (shared memory), this rank's slice is written when the function returns. The memory is complete when
    every rank has signalled that its slice is written.
    """
    owned = memory.own[own]
    if group.alone:
        return None
    if memory.every is None:
        return all_gather_flat(memory.own, owned, group=group.group, async_op=True)
    for index, other in enumerate(memory.every):
        if index != group.index:
            other[own].copy_(owned)
    return None


@torch.no_grad()
def give_back(group: RankGroup, buckets: Sequence[Bucket]) -> None:
    """All-gather the reduced gradients of sharded buckets, and set `.grad`. Collective over the group."""
    works = []
    for bucket in buckets:
        owned = bucket.buffer.flat[bucket.own][: bucket.used]
        if owned.data_ptr() != bucket.gradient.data_ptr():
            owned.copy_(bucket.gradient)
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
    """Overlaps all-gathers of parameters with the next forward pass: a hook on each module waits only for the parameters of this
    module.

    For a parameter whose module was never called, `hold_back` waits before the step ends: another module may use the parameter
    directly, as in `F.linear(x, self.child.weight)`, and would read the parameter before the all-gather is complete.

    Args:
        model: The model of this rank, on which hooks are registered.
        gathers: The all-gathers of its parameters.
    """

    def __init__(self, model: nn.Module, gathers: Sequence[Gather]) -> None:
        self._gathers = list(gathers)
        self._called: set[int] = set()
        gather_of: dict[int, tuple[Gather, BucketValues]] = {}
        for gather in gathers:
            for values in gather.values:
                gather_of.update((id(parameter), (gather, values)) for parameter in values.bucket.parameters)

        # The hooks are functions, not methods: the model must not keep alive an engine that is no longer used.
        all_gathers, called = self._gathers, self._called

        def wait_for_all(*_: object) -> None:
            for gather in all_gathers:
                gather.wait()

        def waiting_for(own: Mapping[int, tuple[Gather, BucketValues]]) -> Any:
            def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                called.update(own)
                for gather, values in own.values():
                    gather.wait([values])

            return before

        for_all = ModelHook(wait_for_all)
        self._handles = [
            model.register_state_dict_pre_hook(for_all),
            model.register_load_state_dict_pre_hook(for_all),
        ]
        for module in model.modules():
            own = {id(p): gather_of[id(p)] for p in module.parameters(recurse=False) if id(p) in gather_of}
            if own:
                self._handles.append(module.register_forward_pre_hook(ModelHook(waiting_for(own))))

    def hold_back(self) -> None:
        """At the end of a step, wait for each bucket with a parameter of a module that was not called in the step."""
        for gather in self._gathers:
            gather.wait([v for v in gather.values if any(id(p) not in self._called for p in v.bucket.parameters)])

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
