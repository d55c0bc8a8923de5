"""Buckets that no other rank shares: nothing is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from colonnade.comm.memory import Memory
from colonnade.comm.rank_group import RankGroup
from colonnade.reduce.transports.base import Transport, is_one, real

if TYPE_CHECKING:
    from colonnade.reduce.bucket import Bucket


class Local(Transport):
    """The factor is all there is to do."""

    name = "local"
    bucket_mb = 100.0  # nothing is won by starting early: few large moves

    @classmethod
    def serves(cls, group: RankGroup, device: torch.device) -> bool:
        return group.alone

    def __init__(self, bucket: Bucket, memory: Memory, group: RankGroup) -> None:
        self._shard, self._used, self._memory = bucket.shard, bucket.used, memory.own

    def start(self) -> None:
        pass

    def finish(self, factor: float | Tensor) -> None:
        if self._shard is not None:
            self._shard.land(self._memory[: self._used], factor)
        elif not is_one(factor):
            real(self._memory).mul_(factor)
