"""One reduction at run time: which of its parameters are in buckets, which are not, and the notes about them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from colonnade.engine.gradient_handler._agreement import FROZEN, MISSING, OUTSIDE, SPARSE
from colonnade.engine.gradient_handler._bucket import Bucket, local
from colonnade.engine.gradient_handler._lane import Lane, Log
from colonnade.engine.gradient_handler._options import GroupReduction, SyncOptions
from colonnade.engine.gradient_handler._party import Party

Ranked = tuple[float, Bucket]
"""A bucket, and how far through its lane it ends (0 to 1): the order in which lanes take turns."""

Places = dict[int, tuple[Bucket, int]]
"""Position of a parameter in its reduction -> its bucket and its index in there."""


class ReductionState:
    """The lanes and buckets of one reduction, and what is known of its parameters.

    `notes` holds one byte per parameter about the step that is being finished. Buckets are laid out at the end of
    a step, which is collective, and taken into use by `switch`, which is not.
    """

    def __init__(self, reduction: GroupReduction, party: Party, options: SyncOptions, log: Log) -> None:
        self.reduction, self.party = reduction, party
        self._lanes: dict[tuple[torch.dtype, torch.device], Lane] = {}
        self._options, self._log = options, log
        self._sparse: set[int] = set()
        self._required = [parameter.requires_grad for parameter in reduction.parameters]
        self._blank = bytes(0 if required else FROZEN for required in self._required)
        self._outside: list[int] = []
        self._last_reports = party.gather_bytes(self._blank) if self._blank else []
        self.active = self._anywhere_active(self._last_reports)
        self.notes = bytearray(self._blank)
        self._order = [position for position in reversed(range(len(self._required))) if self.active[position]]
        self.recording = True
        self._fired: dict[int, int] = {}
        self._fresh = True
        self.ranked: list[Ranked] = []
        self.places: Places = {}
        self._upcoming: list[Ranked] | None = self._lay_out()

    @property
    def must_switch(self) -> bool:
        return self._upcoming is not None

    def switch(self) -> None:
        """Use the buckets that were laid out last; gradients that are still alive move along."""
        if self._upcoming is None:
            return
        for _, bucket in self.ranked:
            for parameter, grad in zip(bucket.parameters, bucket.grads, strict=True):
                if parameter.grad is grad:
                    parameter.grad = grad.clone()
        for lane in self._lanes.values():
            lane.clear()
        self.ranked, self._upcoming = self._upcoming, None
        self.places = {}
        for _, bucket in self.ranked:
            bucket.recording = self.recording
            bucket.move(range(len(bucket.parameters)))
            self.places.update((position, (bucket, i)) for i, position in enumerate(bucket.positions))

    @property
    def order(self) -> list[str]:
        """The names in the order in which their gradients come, as far as it is known."""
        return [self.reduction.names[position] for position in self._order]

    def follow(self, names: Sequence[str]) -> None:
        """Lay the buckets out in this order, of an earlier run; what it does not name comes last. Collective."""
        place = {name: at for at, name in enumerate(names)}
        self._order.sort(key=lambda position: place.get(self.reduction.names[position], len(place)))
        self._upcoming = self._lay_out()

    def begin_pass(self) -> None:
        """A backward pass is about to run: its order of gradients counts, if it makes any."""
        self._fresh = True

    def record(self, position: int) -> None:
        """A gradient has come."""
        if self._fresh:
            self._fired, self._fresh = {}, False
        # Taken out and put back, so that the dictionary is in the order of the last arrivals.
        self._fired[position] = self._fired.pop(position, 0) + 1

    def last_to_come(self, bucket: Bucket) -> tuple[int, int]:
        """Index in the bucket of the gradient that came last when it was recorded, and how often it came."""
        arrival = {position: place for place, position in enumerate(self._fired)}
        places = [arrival.get(position, -1) for position in bucket.positions]
        last = places.index(max(places))
        return last, self._fired.get(bucket.positions[last], 1)

    def plan_ahead(self, reports: list[bytes]) -> None:
        """Lay out new buckets where all ranks' notes, or the recorded order, show the need. Collective."""
        changed = self._adapt(reports)
        if self.recording:
            self._agree_on_order()
        if changed or self.recording:
            self._upcoming = self._lay_out()
        self.recording = changed

    def _lay_out(self) -> list[Ranked]:
        """New buckets for everything active; each lane's in turn. Collective."""
        members: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for position in self._order:
            if self.active[position] and position not in self._sparse:
                tensor = local(self.reduction.parameters[position])
                members.setdefault((tensor.dtype, tensor.device), []).append(position)
        self._outside = [i for i, active in enumerate(self.active) if not active or i in self._sparse]
        ranked: list[Ranked] = []
        for kind in sorted(members, key=str):
            if kind not in self._lanes:
                self._lanes[kind] = Lane(self.reduction, self.party, kind, self._options, self._log)
            ranked += _ranked(self._lanes[kind].lay_out(members[kind]))
        return ranked

    def transport_of(self, bucket: Bucket) -> str:
        return self._lanes[bucket.layout.dtype, bucket.layout.device].transport

    def zero_outside(self) -> None:
        """`zero_grad` for what is not in a bucket."""
        for position in self._outside:
            self.reduction.parameters[position].grad = None

    def open_notes(self) -> None:
        """Begin the notes of a step with what is known of each parameter apart from its bucket."""
        parameters = self.reduction.parameters
        required = [parameter.requires_grad for parameter in parameters]
        if required != self._required:
            self._required = required
            self._blank = bytes(0 if needed else FROZEN for needed in required)
        self.notes = bytearray(self._blank)
        for position in self._outside:
            if required[position]:
                grad = parameters[position].grad
                dense = grad is not None and grad.layout is torch.strided
                self.notes[position] |= MISSING if grad is None else OUTSIDE if dense else SPARSE

    @property
    def remarkable(self) -> bool:
        """Whether the notes say anything but which parameters are frozen."""
        return self.notes != self._blank

    def _adapt(self, reports: list[bytes]) -> bool:
        """Learn which parameters are active or sparse; whether that means other buckets."""
        if reports == self._last_reports:
            return False
        self._last_reports = reports
        active = self._anywhere_active(reports)
        sparse = {i for notes in reports for i, note in enumerate(notes) if note & SPARSE} | self._sparse
        changed = active != self.active or sparse != self._sparse
        if active != self.active:
            self._order = [position for position in reversed(range(len(active))) if active[position]]
        self.active, self._sparse = active, sparse
        return changed

    def _agree_on_order(self) -> None:
        """Take the first rank's order of gradients; those it did not see come last. Collective."""
        known = set(self._order)
        seen = dict.fromkeys(position for position in self._fired if position in known)
        order = [*seen, *(position for position in self._order if position not in seen)]
        packed = b"".join(position.to_bytes(4, "little") for position in order)
        first = self.party.gather_bytes(packed)[0] if packed else b""
        self._order = [int.from_bytes(first[i : i + 4], "little") for i in range(0, len(first), 4)]

    @staticmethod
    def _anywhere_active(reports: Sequence[bytes]) -> list[bool]:
        return [not all(note & FROZEN for note in notes) for notes in zip(*reports, strict=True)]


def _ranked(buckets: list[Bucket]) -> list[Ranked]:
    total, done = max(1, sum(bucket.numel for bucket in buckets)), 0
    ranked = []
    for bucket in buckets:
        done += bucket.numel
        ranked.append((done / total, bucket))
    return ranked
