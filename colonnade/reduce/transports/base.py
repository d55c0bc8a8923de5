"""What a transport is: the way in which one bucket's gradients are summed over the ranks of a group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from colonnade.comm.memory import Memory
from colonnade.comm.rank_group import RankGroup

if TYPE_CHECKING:
    from colonnade.reduce.bucket import Bucket


class Transport(ABC):
    """Sums one bucket in one piece of memory.

    Of a sharded bucket `finish` lands the sum of the owned slice (`bucket.land`); of any other it leaves the whole
    sum in the memory of every rank. Every rank starts the same buckets in the same order.
    """

    name: ClassVar[str]
    bucket_mb: ClassVar[float]
    """The size of bucket that suits it."""
    first_bucket_mb: ClassVar[float] = 1.0
    """That of the bucket which is full first: small, so that communication starts early."""
    shares_memory: ClassVar[bool] = False
    """Whether it needs memory that all ranks of the group see."""
    early: bool = False
    """Whether starting before the end of backward is of use."""
    carries: bool = False
    """Whether every rank gets the sum of a few more numbers that stand behind the gradients."""
    host_waits: ClassVar[bool] = False
    """Whether the host waits in `finish` until the sum is there."""
    reduced_in: torch.dtype | None = None
    """The dtype of the sum, or a narrower one that gradients are sent in; None where nothing is summed over ranks."""
    divides: bool = False
    """Whether it wants gradients that are divided already: that costs nothing while they are moved."""

    @classmethod
    @abstractmethod
    def serves(cls, group: RankGroup, device: torch.device) -> bool:
        """Whether it can sum gradients on this device over these ranks."""

    @classmethod
    def sizes(cls, total: float, ranks: int) -> tuple[float, float]:
        """(size of a bucket, of the first) in MiB, for gradients of `total` MiB over so many ranks."""
        return cls.bucket_mb, cls.first_bucket_mb

    @abstractmethod
    def __init__(self, bucket: Bucket, memory: Memory, group: RankGroup) -> None: ...

    @abstractmethod
    def start(self) -> None:
        """Begin, when the gradients are in the memory; may return before anything is sent."""

    def wait(self) -> None:
        """Before `finish`, of one that carries: have the sum there, not multiplied yet."""
        raise NotImplementedError(f"{type(self).__name__} carries nothing")

    @abstractmethod
    def finish(self, factor: float | Tensor) -> None:
        """Return when the sum is there, multiplied by `factor`."""


def real(flat: Tensor) -> Tensor:
    """A complex buffer as twice as many reals, another as it is."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def is_one(factor: float | Tensor) -> bool:
    """Whether multiplying by it changes nothing, as far as can be told without looking at a device."""
    return isinstance(factor, float) and factor == 1.0
