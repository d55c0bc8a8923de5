"""One reduction at run time: which of its parameters are in buckets, which are not, and the notes about them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from colonnade.engine.gradient_handler._agreement import FROZEN, MISSING, OUTSIDE, SPARSE
from colonnade.engine.gradient_handler._bucket import Bucket, local
from colonnade.engine.gradient_handler._lane import Lane, Log
from colonnade.engine.gradient_handler._options import GroupReduction, SyncOptions
from colonnade.engine.gradient_handler._party import Party

Ranked = tuple[float, Bucket]
"""A bucket, and how far through its lane it ends (0 to 1): the order in which lanes take turns."""


class ReductionState:
    """The lanes of one reduction. `notes` holds one byte per parameter about the step that is being finished."""

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
        self.order = [position for position in reversed(range(len(self._required))) if self.active[position]]

    def lay_out(self) -> list[Ranked]:
        """New buckets for everything active, in `order`; each lane's in turn. Collective."""
        members: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for position in self.order:
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

    def clear(self) -> None:
        """Zero the memory of all lanes."""
        for lane in self._lanes.values():
            lane.clear()

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

    def adapt(self, reports: list[bytes]) -> bool:
        """Learn from all ranks' notes which parameters are active or sparse; whether the buckets must change."""
        if reports == self._last_reports:
            return False
        self._last_reports = reports
        active = self._anywhere_active(reports)
        sparse = {i for notes in reports for i, note in enumerate(notes) if note & SPARSE} | self._sparse
        changed = active != self.active or sparse != self._sparse
        if active != self.active:
            self.order = [position for position in reversed(range(len(active))) if active[position]]
        self.active, self._sparse = active, sparse
        return changed

    def agree_on_order(self, fired: Iterable[int]) -> None:
        """Take the first rank's order of gradients; those it did not see come last. Collective."""
        known = set(self.order)
        seen = dict.fromkeys(position for position in fired if position in known)
        order = [*seen, *(position for position in self.order if position not in seen)]
        packed = b"".join(position.to_bytes(4, "little") for position in order)
        first = self.party.gather_bytes(packed)[0] if packed else b""
        self.order = [int.from_bytes(first[i : i + 4], "little") for i in range(0, len(first), 4)]

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
