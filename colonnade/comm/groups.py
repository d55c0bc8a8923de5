"""torch process groups of this rank: one for each distinct set of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from colonnade.comm.torch_versions import groups_meet, is_alive, timeout_of
from colonnade.errors import ContextError

RankSet = tuple[int, ...]


class NoGroups:
    """The groups of a simulated world, which cannot communicate."""

    def group(self, ranks: Iterable[int]) -> Any:
        """None, with which torch does not communicate."""
        return None

    def destroy(self) -> None:
        """Do nothing."""


class ProcessGroups:
    """Creates, shares and destroys process groups, keyed by the set of ranks."""

    def __init__(self, rank: int, timeout: timedelta | None = None) -> None:
        self._rank = rank
        self._timeout = timeout
        self._groups: dict[RankSet, Any] = {}
        self._made: list[Any] = []
        self._second: dict[tuple[RankSet, str], Any] = {}
        # Every set that was ever created, with or without this rank, because all ranks must skip the same ones.
        self._known: set[RankSet] = set()

    def add(self, ranks: RankSet, alone: bool) -> None:
        """Create the group of a rank set unless it exists. Collective over the world (with `alone`, over the set), in one order."""
        if ranks not in self._known:
            self._known.add(ranks)
            world = len(ranks) == dist.get_world_size()
            group = dist.group.WORLD if world else self.create(ranks, None, alone)
            if self._rank in ranks:
                self._groups[ranks] = group

    def create(self, ranks: RankSet, backend: str | None, alone: bool) -> Any:
        """A new group, with the world's backend or another, until `destroy`. Collective over the world or, with `alone`, the set.

        Ranks outside the group must call this too, because torch numbers groups by count; they open no connection. With `alone`
        only the ranks of the group call it. torch then numbers the group by the number of groups that a rank has, so all of its
        ranks must have created equally many before.
        """
        with groups_meet(len(ranks), backend):
            group = dist.new_group(list(ranks), self._timeout, backend, use_local_synchronization=alone)
        if self._rank in ranks:
            self._made.append(group)
        return group

    def adopt(self, ranks: RankSet, group: Any, others: Iterable[RankSet]) -> None:
        """Use a group that other code created and will destroy; `others` are the sets of the groups created together with it."""
        self._groups[ranks] = group
        self._known.update([ranks, *others])

    def group(self, ranks: Iterable[int]) -> Any:
        """The process group of exactly these ranks."""
        key = tuple(ranks)
        if key not in self._groups:
            raise ContextError(
                f"there is no group of exactly the ranks {list(key)} on rank {self._rank}; only modes of the config have "
                f"groups. Add a mode with a group of these ranks.",
                code="C012",
            )
        return self._groups[key]

    def __contains__(self, ranks: RankSet) -> bool:
        return ranks in self._known

    def second_group(self, ranks: Iterable[int], rank_sets: Iterable[Iterable[int]], backend: str) -> Any:
        """A second group of `ranks`, with another backend. The first call creates those of all `rank_sets`, collectively."""
        for rank_set in map(tuple, rank_sets):
            if (rank_set, backend) not in self._second:
                with groups_meet(len(rank_set), backend):
                    group = dist.new_group(list(rank_set), timeout_of(), backend)  # with the world's timeout
                self._second[rank_set, backend] = group
                if self._rank in rank_set:
                    self._made.append(group)
        return self._second[tuple(ranks), backend]

    def __len__(self) -> int:
        return len(self._groups)

    def destroy(self) -> None:
        """Destroy the groups created here; the world and adopted groups belong to others."""
        for group in self._made:
            if is_alive(group):
                dist.destroy_process_group(group)
