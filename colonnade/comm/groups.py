"""Torch process groups and their CPU twins: one per distinct rank set, only where this rank is in it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from colonnade.comm.torch_versions import is_alive, timeout_of
from colonnade.errors import ContextError

RankSet = tuple[int, ...]


class ProcessGroups:
    """Creates, shares and destroys process groups, keyed by the set of ranks."""

    def __init__(self, rank: int, cpu_twins: bool, timeout: timedelta | None = None) -> None:
        self._rank = rank
        self._timeout = timeout
        self._cpu_twins = cpu_twins and dist.get_backend() != "gloo"
        self._groups: dict[RankSet, Any] = {}
        self._cpu_groups: dict[RankSet, Any] = {}
        self._second: dict[tuple[RankSet, str], Any] = {}
        self._borrowed: set[RankSet] = set()
        # Every set that was ever created, this rank in it or not: all ranks must skip the same ones.
        self._created: set[RankSet] = set()

    def add(self, ranks: RankSet) -> None:
        """Create the group of one rank set, unless it is there. Collective over the world, in one order.

        A rank that is not in it only counts it (torch numbers groups by count) and opens no connection.
        """
        if ranks in self._created:
            return
        self._created.add(ranks)
        world = len(ranks) == dist.get_world_size()
        group = dist.group.WORLD if world else dist.new_group(list(ranks), self._timeout)
        twin = dist.new_group(list(ranks), self._timeout, backend="gloo") if self._cpu_twins else group
        if world:
            self._borrowed.add(ranks)
        if self._rank in ranks:
            self._groups[ranks] = group
            self._cpu_groups[ranks] = twin

    def adopt(self, ranks: RankSet, group: Any, cpu_group: Any) -> None:
        """Use a group that somebody else created and will destroy."""
        self._groups[ranks] = group
        self._cpu_groups[ranks] = cpu_group if cpu_group is not None else group
        self._borrowed.add(ranks)

    def know(self, rank_sets: Iterable[RankSet]) -> None:
        """Note sets that exist although nobody created them here, so that no rank creates them again."""
        self._created.update(rank_sets)

    def group(self, ranks: Iterable[int]) -> Any:
        """The process group of exactly these ranks."""
        return self._find(self._groups, tuple(ranks))

    def cpu_group(self, ranks: Iterable[int]) -> Any:
        """The gloo twin of the group; the group itself where the backend is gloo."""
        key = tuple(ranks)
        if not self._cpu_twins and dist.get_backend() != "gloo":
            raise ContextError(
                f"no gloo twin exists for the group of ranks {list(key)}; launch with cpu_groups=True to have them"
            )
        return self._find(self._cpu_groups, key)

    def second_group(self, ranks: Iterable[int], rank_sets: Iterable[Iterable[int]], backend: str) -> Any:
        """Another group of `ranks`, with backends of its own. Collective over the world for all `rank_sets` at first."""
        for key in [(tuple(each), backend) for each in rank_sets]:
            if key not in self._second:
                self._second[key] = dist.new_group(list(key[0]), timeout_of(), backend)  # as long as the world waits
        return self._second[tuple(ranks), backend]

    def __len__(self) -> int:
        return len(self._groups)

    def destroy(self) -> None:
        """Destroy what was created here; borrowed groups stay with their owner."""
        own = [group for ranks, group in self._groups.items() if ranks not in self._borrowed]
        twins = list(self._cpu_groups.values()) if self._cpu_twins else []
        for group in [*own, *twins, *self._second.values()]:
            if is_alive(group):
                dist.destroy_process_group(group)
        for held in (self._groups, self._cpu_groups, self._second, self._borrowed, self._created):
            held.clear()

    def _find(self, held: dict[RankSet, Any], ranks: RankSet) -> Any:
        if ranks not in held:
            raise ContextError(
                f"there is no group of exactly the ranks {list(ranks)} on rank {self._rank}; groups exist for "
                f"the modes of the config. Add a mode whose groups are these ranks."
            )
        return held[ranks]
