"""A team: the ranks among which parameters are sharded, with their messages and the memory they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.errors import GradientError
from colonnade.optim.zero.settings import Travel

all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The flat collectives under the names that this torch does not warn about."""


class Party(Protocol):
    """The ranks of one group as this rank sees them, and the small messages between them.

    `peers` is not None where all ranks share this host, so that memory can be shared.
    """

    ranks: tuple[int, ...]
    index: int
    size: int
    group: dist.ProcessGroup | None
    peers: Any

    def connect(self) -> str | None: ...

    def signal(self, payload: bytes) -> None: ...

    def collect(self) -> list[bytes]: ...

    def gather_bytes(self, payload: bytes) -> list[bytes]: ...

    def gather_objects(self, value: Any) -> list[Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Means:
    """How a party is opened, and how memory is had that all of its ranks map (or why not): the engine's own ways."""

    open: Callable[[Sequence[int], dist.ProcessGroup | None], Party]
    share: Callable[[Any, int, torch.dtype], tuple[list[Tensor], None] | tuple[None, str]]
    log: Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Flat:
    """Flat memory: this rank's, and (where it is shared) every rank's in team order."""

    own: Tensor
    every: list[Tensor] | None = None

    def first(self, numel: int) -> Flat:
        """Its first elements."""
        return Flat(self.own[:numel], [memory[:numel] for memory in self.every] if self.every is not None else None)


class Team:
    """One set of ranks; made on all of them at once. Collective."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        group: dist.ProcessGroup | None,
        device: torch.device,
        means: Means,
        travel: Travel,
    ) -> None:
        self.party = means.open(ranks, group)
        self.ranks, self.index, self.size = self.party.ranks, self.party.index, self.party.size
        self.group = self.party.group
        self.device = device
        self.travel = travel
        self.shared = False
        self._means = means
        if self.size > 1 and device.type == "cpu" and travel.shared_memory is not False:
            self.shared = self._usable(self.party.connect())

    @property
    def alone(self) -> bool:
        """Whether nothing is to be sent."""
        return self.size == 1

    def allocate(self, numel: int, dtype: torch.dtype, zero: bool = True) -> Flat:
        """Memory of `numel` elements on every rank; shared if it can be. Collective."""
        if self.shared:
            every, problem = self._means.share(self.party, max(1, numel), dtype)
            if every is not None:
                return Flat(every[self.index][:numel], [memory[:numel] for memory in every])
            self.shared = self._usable(problem)
        make = torch.zeros if zero else torch.empty
        return Flat(make(numel, dtype=dtype, device=self.device))

    def exchange(self, payload: bytes) -> list[bytes]:
        """`payload` (of equal length) of every rank; waits for the slowest."""
        self.party.signal(payload)
        return self.party.collect()

    def close(self) -> None:
        self.party.close()

    def _usable(self, problem: str | None) -> bool:
        if problem is None:
            return True
        if self.travel.shared_memory is True:
            raise GradientError(f'shared_memory=True, but {problem}. Use "auto" to fall back by itself')
        self._means.log(f"shards travel by the process group, not by shared memory: {problem}")
        return False
