"""Sums by NCCL. All of a scheme is queued on a side stream at once, and the host waits for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.comm.memory import Memory
from colonnade.comm.rank_group import RankGroup
from colonnade.reduce.transports.collective import Collective

if TYPE_CHECKING:
    from colonnade.reduce.bucket import Bucket


class DeviceCollective(Collective):
    """By any backend that queues its collectives on a device."""

    bucket_mb = 25.0
    most_mb = 100.0
    host_waits = False
    _piece_bytes = 1 << 62

    @classmethod
    def sizes(cls, total: float, ranks: int) -> tuple[float, float]:
        """Few buckets: each costs a launch on every rank. Larger over more ranks, of which each gets a slice."""
        size = min(max(cls.bucket_mb, total / 3, ranks / 2), cls.most_mb)
        return size, size / 2

    @classmethod
    def serves(cls, group: RankGroup, device: torch.device) -> bool:
        return device.type == "cuda" and "cuda:nccl" in dist.get_backend_config(group.group)

    def __init__(self, bucket: Bucket, memory: Memory, group: RankGroup) -> None:
        super().__init__(bucket, memory, group)
        self._stream = torch.cuda.Stream(memory.own.device)
        self._ready: list[Tensor] = []

    def start(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._whole.device))
        with torch.cuda.stream(self._stream):
            for work, part in self._scheme():
                if work is not None:
                    work.wait()
                if part is not None:
                    self._ready.append(part)

    def wait(self) -> None:
        torch.cuda.current_stream(self._whole.device).wait_stream(self._stream)

    def finish(self, factor: float | Tensor) -> None:
        stream = torch.cuda.current_stream(self._whole.device)
        stream.wait_stream(self._stream)
        for part in self._ready:
            part.record_stream(stream)
            self._put(part, factor * self._rescale)
        self._ready = []
