"""A lane: the parameters of one reduction with one dtype on one device, their memory and their transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.engine.gradient_handler._bucket import Bucket, Task, fill
from colonnade.engine.gradient_handler._options import GroupReduction, SyncOptions
from colonnade.engine.gradient_handler._party import Party
from colonnade.engine.gradient_handler._shared_memory import SharedTask, allocate_shared
from colonnade.engine.gradient_handler._transport import LocalTask, collective_task, sum_dtype
from colonnade.errors import GradientError

_MB = 1 << 20
_BUCKET_MB = {"shared memory": 4.0, "cpu": 8.0, "local": 100.0}
"""On a device of a world of one ("local") nothing travels, so nothing is won by starting early: few large moves."""
_BUCKET_MB_ELSEWHERE = 25.0

Log = Callable[[str], None]

HEAP_BYTES = 31 << 20


class Lane:
    """Owns one allocation, in which all its buckets lie, in whatever order they are laid out."""

    def __init__(
        self,
        reduction: GroupReduction,
        party: Party,
        kind: tuple[torch.dtype, torch.device],
        options: SyncOptions,
        log: Log,
    ) -> None:
        self.reduction, self.party = reduction, party
        self.dtype, self.device = kind
        self._options, self._log = options, log
        self._shared = party.peers is not None and self.device.type == "cpu"
        self._memory: list[Tensor] = []
        self._own = party.index if self._shared else 0

    @property
    def transport(self) -> str:
        """How gradients travel: "shared memory", "local" (one rank) or the name of torch's backend."""
        if self.party.group is None or self.party.size == 1:
            return "local"
        if self._shared:
            return "shared memory"
        pairs = dist.get_backend_config(self.party.group).split(",")
        return dict(pair.split(":") for pair in pairs).get(self.device.type, "unknown")

    def lay_out(self, order: Sequence[int]) -> list[Bucket]:
        """Buckets for the parameters at these positions, placed in this lane's memory.

        Collective where the memory must grow; the same order on every rank.
        """
        way = "shared memory" if self._shared else "cpu" if self.device.type == "cpu" else self.transport
        reserve = self._options.bucket_mb or _BUCKET_MB.get(way, _BUCKET_MB_ELSEWHERE)
        buckets = fill(self.reduction, order, reserve * _MB, self._options.first_bucket_mb * _MB)
        self._reserve(sum(bucket.numel for bucket in buckets))
        start = 0
        for bucket in buckets:
            rooms = [memory[start : start + bucket.numel] for memory in self._memory]
            bucket.place(rooms[self._own])
            bucket.task = self._task(bucket, rooms)
            start += bucket.numel
        return buckets

    def clear(self) -> None:
        """Zero this rank's memory: a new layout has its padding elsewhere."""
        if self._memory:
            self._memory[self._own].zero_()

    def _task(self, bucket: Bucket, rooms: list[Tensor]) -> Task:
        if self.transport == "local":
            return LocalTask(bucket)
        if self._shared:
            return SharedTask(bucket, rooms, self._own, sum_dtype(self.dtype, self._options))
        return collective_task(bucket, self.party, self._options)

    def _reserve(self, numel: int) -> None:
        if self._memory and self._memory[0].numel() >= numel:
            return
        if self._shared:
            memory, problem = allocate_shared(self.party, max(numel, 1), self.dtype)
            if memory is not None:
                self._memory = memory
                return
            if self._options.shared_memory is True:
                raise GradientError(f"shared_memory=True, but {problem}")
            self._log(f"gradients travel by the process group, not by shared memory: {problem}")
            self._shared, self._own = False, 0
        self._memory = [torch.zeros(numel, dtype=self.dtype, device=self.device)]


def keep_heap() -> None:
    """Make glibc keep freed memory for the next step, instead of giving it back and faulting it in again.

    With gradients in buckets the heap is all but empty after backward, and glibc would shrink it at each step. It
    learns from a large block that is freed: blocks of this size stay on the heap from then on, up to twice as
    much in all (32 MiB is the most it learns from). Elsewhere this does nothing.
    """
    torch.empty(HEAP_BYTES, dtype=torch.uint8)
