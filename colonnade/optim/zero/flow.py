"""The gradients of one bucket on their way: from the parameters into a room, and from all rooms into the slice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from colonnade.errors import GradientError
from colonnade.optim.zero.bucket import Member, ShardedBucket
from colonnade.optim.zero.sums import slice_sum
from colonnade.optim.zero.team import Flat
from colonnade.parallel.placement import is_dtensor

LARGE_BYTES = 256 << 10
"""A gradient from this size on is worth moving by itself, while it is in the cache."""

PRESENT, LATE = 1, 2


class Flow:
    """How far the gradients of a bucket have got in this step and in this pass.

    A bucket with `keeps` has a room of its own, in which gradients may lie from the first pass on; else it takes
    turns with others in `rooms`. One that is `early` is summed as soon as it is full. `anywhere` says of each
    parameter whether any rank had a gradient at the last step (`is_whole`: so it was with all), `late` whether any
    rank had one beside the room.
    """

    def __init__(self, bucket: ShardedBucket, rooms: Sequence[Flat], divisor: float, keeps: bool, prompt: bool) -> None:
        self.bucket = bucket
        self.divisor = divisor
        self.keeps = keeps
        self.rooms = list(rooms)
        self.sums = [slice_sum(bucket, room, prompt) for room in rooms]
        self.parameters = [member.parameter for member in bucket.members]
        self._views = [bucket.layout.views(room.own[: bucket.layout.numel]) for room in rooms]
        self._gaps = [bucket.gaps(room.own) for room in rooms]
        self.large = [i for i, p in enumerate(self.parameters) if keeps and _is_large(p)]
        self.early = not self.sums[0].prompt
        self.expected = set(range(len(self.parameters)))
        self.present = bytearray(len(self.parameters))
        self.anywhere = [True] * len(self.parameters)
        self.started = self.full = self.landed = self.late = self.is_whole = False
        self._seen: set[int] = set()

    @property
    def prompt(self) -> bool:
        return self.sums[0].prompt

    def begin(self) -> None:
        """A backward pass is about to run."""
        self.started = self.full = False
        self._seen.clear()

    def arrived(self, index: int) -> bool:
        """A gradient has come; whether that was the last of those expected."""
        if index not in self._seen:
            self._seen.add(index)
            self.full = not self.started and self._seen >= self.expected
            return self.full
        return False

    def keep(self, index: int) -> None:
        """Move one gradient into the room now; what comes on top of it is added there."""
        parameter, view = self.parameters[index], self._views[0][index]
        grad = parameter.grad
        if grad is not None and grad is not view and grad.layout is torch.strided and not self.started:
            view.copy_(grad)
            parameter.grad = view

    @torch.no_grad()
    def fill(self, at: int) -> None:
        """Bring all gradients into the room and let go of them; zeros for those that are missing."""
        views = self._views[at]
        sources, targets, empty = [], [], list(self._gaps[at])
        for index, (parameter, view) in enumerate(zip(self.parameters, views, strict=True)):
            grad = parameter.grad
            if grad is None:
                empty.append(view)
                continue
            self.present[index] = PRESENT
            if grad is not view:
                sources.append(local_grad(self.bucket.members[index]))
                targets.append(view)
            parameter.grad = None
        if empty:
            torch._foreach_zero_(empty)
        if sources:
            torch._foreach_copy_(targets, sources)
        self.started = True

    def land(self, at: int) -> None:
        """Have the sum over the ranks in the slice, on top of what earlier passes have brought there."""
        bucket = self.bucket
        self.sums[at].land(bucket.grads, 1.0 / self.divisor, self.landed)
        self.landed = True

    def notes(self) -> bytes:
        """One byte per parameter: whether it got a gradient in this step, and one that came too late for the room."""
        late = [LATE | PRESENT if parameter.grad is not None else 0 for parameter in self.parameters]
        return bytes(a | b for a, b in zip(self.present, late, strict=True))

    def take(self, notes: bytes) -> None:
        """What all ranks together say of this step's gradients."""
        self.is_whole = notes == bytes([PRESENT]) * len(notes)
        self.late = not self.is_whole and any(note & LATE for note in notes)
        self.anywhere = [bool(note & PRESENT) for note in notes]

    @torch.no_grad()
    def late_room(self) -> Tensor:
        """The late gradients in a room of their own, zeros elsewhere."""
        room = self.rooms[0].own.new_zeros(self.bucket.numel)
        for member, view in zip(
            self.bucket.members, self.bucket.layout.views(room[: self.bucket.layout.numel]), strict=True
        ):
            if member.parameter.grad is not None:
                view.copy_(local_grad(member))
                member.parameter.grad = None
        return room

    def show_grads(self) -> None:
        """Make `.grad` the final gradient in the room, where any rank had one."""
        for parameter, view, is_present in zip(self.parameters, self._views[0], self.anywhere, strict=True):
            parameter.grad = view if is_present else None

    def end(self) -> None:
        """The step's gradients are final: expect the same ones next time."""
        if any(self.present):
            self.expected = {index for index, note in enumerate(self.present) if note}
        self.forget()

    def forget(self) -> None:
        """Begin anew, as if no gradient had come."""
        self.present = bytearray(len(self.parameters))
        self.started = self.full = self.landed = False
        self._seen.clear()


def local_grad(member: Member) -> Tensor:
    """The gradient as this rank's part of the parameter lies; a sparse one is refused."""
    grad: Any = member.parameter.grad
    if is_dtensor(grad):
        placed: Any = member.parameter
        return grad.redistribute(placements=placed.placements).to_local().detach()
    if grad.layout is not torch.strided:
        raise GradientError(
            f"the gradient of {member.name!r} is {grad.layout}, and ZeRO shards dense gradients only; build its layer "
            f"with sparse=False, or turn zero off"
        )
    return grad


def _is_large(parameter: Tensor) -> bool:
    return not is_dtensor(parameter) and parameter.device.type == "cpu" and parameter.nbytes >= LARGE_BYTES
