"""Sharded buckets: parameters that lie one after another in flat memory, cut into one equal slice per rank.

A rank steps on its slice alone. What the optimizer sees of it are *pieces*: the part of one parameter that lies in
the slice. So parameter groups, weight decay and missing gradients mean what they mean to the whole parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from colonnade.optim.zero.team import Flat, Team
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.flat import ALIGN_BYTES, FlatLayout
from colonnade.parallel.placement import is_dtensor

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter of the optimizer: its name, its group, and how many teams hold the same elements."""

    name: str
    parameter: nn.Parameter
    group: int
    copies: int

    @property
    def local(self) -> Tensor:
        """The elements that this rank's model holds."""
        with torch.no_grad():
            return local_part(self.parameter).detach()


@dataclass(eq=False)
class Piece:
    """Elements [start, stop) of a member, in the order they have in memory; at [at, ...) of this rank's slice.

    `value` is what the optimizer steps on, `grad` its gradient.
    """

    member: Member
    start: int
    stop: int
    at: int
    value: Tensor = field(init=False)
    grad: Tensor = field(init=False)

    @property
    def numel(self) -> int:
        return self.stop - self.start


class ShardedBucket:
    """Members, their flat parameters on every rank of the team, and this rank's slice of them.

    `values` is the slice that is stepped on: the parameters themselves, or (half precision, offload) a master
    copy of them. `grads` is the slice's final gradient, made by `use_grads`.
    """

    def __init__(self, members: Sequence[Member], team: Team) -> None:
        self.members = tuple(members)
        self.team = team
        self.layout = FlatLayout([member.local for member in members])
        step = team.size * max(1, ALIGN_BYTES // self.layout.dtype.itemsize)
        self.numel = -(-self.layout.numel // step) * step
        self.width = self.numel // team.size
        self.own = slice(team.index * self.width, (team.index + 1) * self.width)
        self.pieces = self._cut()
        self.used = self.pieces[-1].at + _padded(self.pieces[-1].numel, self.dtype) if self.pieces else 0
        self._versions: list[int] = []
        self._aside: list[tuple[Tensor, Tensor]] = []
        self.grads = torch.empty(0)

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    @property
    def wide(self) -> torch.dtype:
        """The dtype of a master copy."""
        return torch.float32 if self.dtype in HALVES else self.dtype

    @torch.no_grad()
    def use_memory(self, flat: Flat, masters: bool, device: torch.device) -> None:
        """Move the parameters into `flat`; with `masters`, step on a copy of the slice that lies on `device`."""
        self.flat = flat
        for member, view in zip(self.members, self.layout.views(flat.own[: self.layout.numel]), strict=True):
            view.copy_(member.local)
            if is_dtensor(member.parameter):
                # What made it (FSDP2) knows where its elements lie: they stay there, and are copied in and out.
                self._aside.append((member.local, view))
            else:
                member.parameter.data = view
        mine = flat.own[self.own][: self.used]
        self.has_masters = masters
        self.values = mine.to(device, self.wide, copy=True) if masters else mine
        self._cut_up(self.values, "value")
        self._note_versions()

    def use_grads(self, grads: Tensor) -> None:
        """The slice's gradients will be here."""
        self.grads = grads
        self._cut_up(grads, "grad")

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the stepped slice to this rank's parameters; the others' still have to be told."""
        if self.has_masters:
            self.flat.own[self.own][: self.used].copy_(self.values)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take up what somebody wrote into the parameters since the last look (loaded weights, say)."""
        for local, view in self._aside:
            view.copy_(local)
        if self.has_masters and self._versions != [piece.member.parameter._version for piece in self.pieces]:
            self.values.copy_(self.flat.own[self.own][: self.used])
            self._note_versions()

    @torch.no_grad()
    def settle(self) -> None:
        """The flat parameters of all ranks have come: bring them to parameters that lie elsewhere."""
        for local, view in self._aside:
            local.copy_(view)

    def gaps(self, room: Tensor) -> list[Tensor]:
        """The padding of a room of this bucket."""
        spans = self.layout.spans
        stops = [span.stop for span in spans]
        starts = [*(span.start for span in spans[1:]), self.numel]
        return [room[stop:start] for stop, start in zip(stops, starts, strict=True) if start > stop]

    def _note_versions(self) -> None:
        self._versions = [piece.member.parameter._version for piece in self.pieces] if self.has_masters else []

    def _cut(self) -> list[Piece]:
        pieces = []
        for member, span in zip(self.members, self.layout.spans, strict=True):
            start, stop = max(span.start, self.own.start), min(span.stop, self.own.stop)
            if start < stop:
                pieces.append(Piece(member, start - span.start, stop - span.start, start - self.own.start))
        return pieces

    def _cut_up(self, slice_: Tensor, name: str) -> None:
        for piece in self.pieces:
            setattr(piece, name, slice_[piece.at : piece.at + piece.numel])


def fill_buckets(members: Iterable[Member], team: Team, cap: float) -> list[ShardedBucket]:
    """Cut members of one dtype into buckets of at most `cap` bytes, the last of the model first."""
    buckets: list[ShardedBucket] = []
    taken: list[Member] = []
    room = cap
    for member in reversed(list(members)):
        nbytes = member.local.nbytes
        if taken and nbytes > room:
            buckets.append(ShardedBucket(taken, team))
            taken, room = [], cap
        taken.append(member)
        room -= nbytes
    return [*buckets, ShardedBucket(taken, team)] if taken else buckets


def _padded(numel: int, dtype: torch.dtype) -> int:
    step = max(1, ALIGN_BYTES // dtype.itemsize)
    return -(-numel // step) * step
