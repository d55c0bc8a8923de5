"""Slices back to everybody: after a step, each rank's slice of the parameters goes to all ranks of its team."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.optim.zero.bucket import ShardedBucket
from colonnade.optim.zero.team import Flat, Team, all_gather_flat


class Gather:
    """Gathers the buckets of one team; `begin` after each step, `wait` before parameters are read."""

    def __init__(self, team: Team, buckets: Sequence[ShardedBucket]) -> None:
        self.team = team
        self.buckets = list(buckets)
        self._works: dict[int, Any] = {}
        self._told = False

    @torch.no_grad()
    def begin(self) -> None:
        """Send this rank's slices; those that the next forward pass needs first go first."""
        for bucket in reversed(self.buckets):
            bucket.publish()
            self._works[id(bucket)] = None if self.team.alone else spread(self.team, bucket.flat, bucket.own)
        if self._shares:
            self.team.party.signal(b"p")
            self._told = True

    def wait(self, buckets: Iterable[ShardedBucket] | None = None) -> None:
        """The parameters of these buckets (None: of all) are whole when this returns."""
        if self._told:
            self._told = False
            self.team.party.collect()
        for bucket in self.buckets if buckets is None else buckets:
            if id(bucket) in self._works:
                work = self._works.pop(id(bucket))
                if work is not None:
                    work.wait()
                bucket.settle()

    @property
    def _shares(self) -> bool:
        return any(bucket.flat.every is not None for bucket in self.buckets)


def spread(team: Team, room: Flat, own: slice) -> Any:
    """Bring this rank's slice of a room to the rooms of all; returns what to wait for.

    Shared memory is written at once, and is whole when every rank has said so.
    """
    mine = room.own[own]
    if room.every is None:
        return all_gather_flat(room.own, mine, group=team.group, async_op=True)
    for index, other in enumerate(room.every):
        if index != team.index:
            other[own].copy_(mine)
    return None


class GatherAhead:
    """Lets the gathers run on into the next forward pass: each module waits for the parameters it has itself.

    Only parameters whose module has been called may be late. One that other modules reach for (as in
    `F.linear(x, self.child.weight)`, with no call of the child) would be read before anyone has waited for it, so
    `hold_back` waits for its bucket at once.
    """

    def __init__(self, model: nn.Module, gathers: Sequence[Gather]) -> None:
        self._gathers = list(gathers)
        self._called: set[int] = set()
        place: dict[int, tuple[Gather, ShardedBucket]] = {}
        for gather in gathers:
            for bucket in gather.buckets:
                place.update((id(member.parameter), (gather, bucket)) for member in bucket.members)
        self._handles = [model.register_state_dict_pre_hook(self._whole(gathers))]
        for module in model.modules():
            mine = {id(p): place[id(p)] for p in module.parameters(recurse=False) if id(p) in place}
            if mine:
                self._handles.append(module.register_forward_pre_hook(self._waiting(mine)))

    def hold_back(self) -> None:
        """After a step: wait for every bucket with a parameter that no call of its module has announced so far."""
        for gather in self._gathers:
            gather.wait([b for b in gather.buckets if any(id(m.parameter) not in self._called for m in b.members)])

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    @staticmethod
    def _whole(gathers: Sequence[Gather]) -> Any:
        def before(*_: object) -> None:
            for gather in gathers:
                gather.wait()

        return before

    def _waiting(self, mine: Mapping[int, tuple[Gather, ShardedBucket]]) -> Any:
        def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._called.update(mine)
            for gather, bucket in mine.values():
                gather.wait([bucket])

        return before
