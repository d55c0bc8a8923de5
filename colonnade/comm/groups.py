"""Torch process groups: one per distinct rank set, only where this rank is in it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from colonnade.comm.torch_versions import groups_meet, is_alive, timeout_of
from colonnade.errors import ContextError

RankSet = tuple[int, ...]


class NoGroups:
    """The groups of a world that is only simulated: they can be had, but there is nobody in them."""

    def group(self, ranks: Iterable[int]) -> Any:
        """No group: torch refuses to communicate with it."""
        return None

    def destroy(self) -> None:
        """There is nothing to destroy."""


class ProcessGroups:
    """Creates, shares and destroys process groups, keyed by the set of ranks."""

    def __init__(self, rank: int, timeout: timedelta | None = None) -> None:
        self._rank = rank
        self._timeout = timeout
        self._groups: dict[RankSet, Any] = {}
        self._made: list[Any] = []
        self._second: dict[tuple[RankSet, str], Any] = {}
        # Every set that was ever created, this rank in it or not: all ranks must skip the same ones.
        self._known: set[RankSet] = set()

    def add(self, ranks: RankSet, alone: bool) -> None:
        """Create the group of one rank set, unless it is there. Collective over the world, in one order."""
        if ranks not in self._known:
            self._known.add(ranks)
            world = len(ranks) == dist.get_world_size()
            group = dist.group.WORLD if world else self.create(ranks, None, alone)
            if self._rank in ranks:
                self._groups[ranks] = group

    def create(self, ranks: RankSet, backend: str | None, alone: bool) -> Any:
        """A new group, of the world's backend or another, that goes when `destroy` is called.

        A rank that is not in it only counts it (torch numbers groups by count) and opens no connection. With
        `alone`, its ranks create it without the others, which need not know of it; torch then numbers it by how many
        groups a rank has, so all its ranks must have created alike before.
        """
        with groups_meet(len(ranks), backend):
            group = dist.new_group(list(ranks), self._timeout, backend, use_local_synchronization=alone)
        if self._rank in ranks:
            self._made.append(group)
        return group

    def adopt(self, ranks: RankSet, group: Any, others: Iterable[RankSet]) -> None:
        """Use a group that somebody else created and will destroy, and know of those that it created on `others`."""
        self._groups[ranks] = group
        self._known.update([ranks, *others])

    def group(self, ranks: Iterable[int]) -> Any:
        """The process group of exactly these ranks."""
        key = tuple(ranks)
        if key not in self._groups:
            raise ContextError(
                f"there is no group of exactly the ranks {list(key)} on rank {self._rank}; groups exist for "
                f"the modes of the config. Add a mode whose groups are these ranks.",
                code="C012",
            )
        return self._groups[key]

    def __contains__(self, ranks: RankSet) -> bool:
        return ranks in self._known

    def second_group(self, ranks: Iterable[int], rank_sets: Iterable[Iterable[int]], backend: str) -> Any:
        """Another group of `ranks`, with backends of its own. Collective over the world for all `rank_sets` at first."""
        for each in map(tuple, rank_sets):
            if (each, backend) not in self._second:
                with groups_meet(len(each), backend):
                    group = dist.new_group(list(each), timeout_of(), backend)  # as long as the world waits
                self._second[each, backend] = group
                if self._rank in each:
                    self._made.append(group)
        return self._second[tuple(ranks), backend]

    def __len__(self) -> int:
        return len(self._groups)

    def destroy(self) -> None:
        """Destroy what was created here; the world and adopted groups stay with their owner."""
        for group in self._made:
            if is_alive(group):
                dist.destroy_process_group(group)
