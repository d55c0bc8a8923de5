"""One sum at run time: which of its parameters are in buckets, which are not, and the notes about them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from colonnade.comm.rank_group import RankGroup
from colonnade.errors import GradientError
from colonnade.reduce.bucket import FAILED, FROZEN, MISSING, OUTSIDE, SPARSE, Bucket
from colonnade.reduce.records import Sum
from colonnade.reduce.storage import BucketStorage

Places = dict[int, tuple[Bucket, int]]
"""Position of a parameter in its sum -> its bucket and its index in there."""

Kind = tuple[torch.dtype, torch.device]


class SumState:
    """The buckets of one sum, and what is known of its parameters.

    `buckets` are in the order in which they start, `laid_out` in that of memory. `notes` holds one byte per parameter about the step that is being
    finished. While `recording`, the order in which gradients come is written down; buckets then start in the order in
    which they were complete on the first rank.
    """

    def __init__(self, sum_: Sum, group: RankGroup) -> None:
        self.sum, self.group = sum_, group
        self._storages: dict[Kind, BucketStorage] = {}
        self._sparse: set[int] = set()
        self._required = [parameter.requires_grad for parameter in sum_.parameters]
        self._blank = bytes(0 if required else FROZEN for required in self._required)
        self._outside: list[int] = []
        self._last_reports = group.gather_bytes(self._blank) if self._blank else []
        self.active = _anywhere_active(self._last_reports)
        self.notes = bytearray(self._blank)
        self._started: dict[int, int] = {}
        self.recording = True
        self._fired: dict[int, int] = {}
        self._fresh = True
        self.buckets: list[Bucket] = []
        self.laid_out: list[Bucket] = []
        self.places: Places = {}
        self._kinds: list[Kind] = []
        self.lay_out()

    # -- buckets ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def lay_out(self) -> None:
        """Make buckets of everything active, in the reverse of the model's order; gradients that are there move along.

        Collective where memory must grow.
        """
        for bucket in self.buckets:
            for parameter, grad in zip(bucket.parameters, bucket.grads, strict=True):
                if parameter.grad is grad:
                    parameter.grad = grad.clone()
        self.buckets, self.laid_out, self.places = [], [], {}
        for storage in self._storages.values():
            storage.clear()
        self._kinds = [(one.dtype, one.device) for one in self.sum.parameters]
        inside = [active and at not in self._sparse for at, active in enumerate(self.active)]
        members = by_kind(self._kinds, inside)
        self._outside = [i for i, active in enumerate(self.active) if not active or i in self._sparse]
        for kind in sorted(members, key=str):
            if kind not in self._storages:
                self._storages[kind] = BucketStorage(self.sum, self.group, *kind)
            self.buckets += self._storages[kind].lay_out(members[kind])
        self.laid_out = list(self.buckets)
        for bucket in self.buckets:
            bucket.recording = self.recording
            if bucket.keeps_gradients:
                bucket.move(range(len(bucket.parameters)))
            self.places.update((position, (bucket, i)) for i, position in enumerate(bucket.positions))

    def ranked(self) -> list[tuple[float, Bucket]]:
        """The buckets with how far through the sum each ends (0 to 1): the order in which sums take turns."""
        total, done = max(1, sum(bucket.numel for bucket in self.buckets)), 0
        ranked = []
        for bucket in self.buckets:
            done += bucket.numel
            ranked.append((done / total, bucket))
        return ranked

    def start(self, bucket: Bucket, *, early: bool) -> None:
        """Begin the sum of a bucket, and note which gradients are not in it."""
        self.collect(bucket, early=early)
        bucket.send()

    def collect(self, bucket: Bucket, *, early: bool) -> None:
        """All that comes before a bucket is sent."""
        if not bucket.keeps_gradients:
            self._storages[bucket.layout.dtype, bucket.layout.device].take_turn(bucket)
        notes = bucket.collect(early=early)
        for position in bucket.positions:
            note, before = notes.get(position, 0), self._started.get(position, MISSING)
            # A gradient is missing from a step if it is from all passes that were summed.
            self._started[position] = ((note | before) & ~MISSING) | (note & before & MISSING)

    def finish_turns(self) -> None:
        """End the sums of buckets that take turns in memory."""
        for storage in self._storages.values():
            storage.finish_turns()

    # -- the order in which gradients come ----------------------------------------------------------------

    def begin_pass(self) -> None:
        """A backward pass is about to run: its order of gradients counts, if it makes any."""
        self._check_kinds()
        self._fresh = True

    def record(self, position: int) -> None:
        """A gradient has come."""
        if self._fresh:
            self._fired, self._fresh = {}, False
        # Taken out and put back, so that the dictionary is in the order of the last arrivals.
        self._fired[position] = self._fired.pop(position, 0) + 1

    def learn_order(self) -> None:
        """Note what each bucket waits for, and let buckets start as the first rank's became complete. Collective."""
        arrival = {position: at for at, position in enumerate(self._fired)}
        complete = []
        for bucket in self.buckets:
            came = [i for i, position in enumerate(bucket.positions) if position in arrival]
            last = max(came, key=lambda i: arrival[bucket.positions[i]], default=0)
            bucket.expected, bucket.last = came, last
            bucket.firings = self._fired.get(bucket.positions[last], 1)
            complete.append(arrival.get(bucket.positions[last], len(arrival)))
            bucket.recording = False
        order = sorted(range(len(complete)), key=complete.__getitem__)
        of_first, *_ = self.group.gather_objects(order)
        self.buckets = [self.buckets[at] for at in of_first]
        self.recording = False

    # -- notes --------------------------------------------------------------------------------------------

    def open_notes(self, failed: bool) -> None:
        """At the end of backward: what is known of gradients that are in no bucket, or came too late for theirs."""
        required = [parameter.requires_grad for parameter in self.sum.parameters]
        if required != self._required:
            self._required = required
            self._blank = bytes(0 if needed else FROZEN for needed in required)
        self.notes = bytearray(self._blank)
        if failed and self.notes:
            self.notes[0] |= FAILED
        for position in self._outside:
            if required[position]:
                grad = self.sum.parameters[position].grad
                dense = grad is not None and grad.layout is torch.strided
                self.notes[position] |= MISSING if grad is None else OUTSIDE if dense else SPARSE
        for bucket in self.buckets:
            if bucket.started:
                for position, parameter in zip(bucket.positions, bucket.parameters, strict=True):
                    if parameter.grad is not None and parameter.grad.layout is torch.strided:
                        self.notes[position] |= OUTSIDE

    def close_notes(self) -> bytes:
        """When all buckets have started: the notes about this step."""
        for position, note in self._started.items():
            self.notes[position] |= note
        self._started.clear()
        return bytes(self.notes)

    def failed(self, reports: Sequence[bytes]) -> list[int]:
        """The ranks on which backward failed."""
        return [rank for rank, notes in zip(self.group.ranks, reports, strict=True) if notes and notes[0] & FAILED]

    def _check_kinds(self) -> None:
        """Refuse parameters that were given another dtype or device: their gradients have no place in the buckets."""
        kinds = [(parameter.dtype, parameter.device) for parameter in self.sum.parameters]
        if kinds != self._kinds:
            at = next(at for at, (old, new) in enumerate(zip(self._kinds, kinds, strict=True)) if old != new)
            old, new = (f"{dtype} on {device}" for dtype, device in (self._kinds[at], kinds[at]))
            raise GradientError(
                f"{self.sum.names[at]!r} was {old} at initialize() and is {new} now; move or convert the model before "
                f"initialize()"
            )

    @property
    def remarkable(self) -> bool:
        """Whether the notes say anything but which parameters are frozen."""
        return self.notes != self._blank

    def adapt(self, reports: list[bytes]) -> bool:
        """Learn from all ranks' notes which parameters are active or sparse; whether that means other buckets."""
        if self.sum.sharding is not None or reports == self._last_reports:
            return False
        self._last_reports = reports
        active = _anywhere_active(reports)
        sparse = {i for notes in reports for i, note in enumerate(notes) if note & SPARSE} | self._sparse
        changed = active != self.active or sparse != self._sparse
        self.active, self._sparse = active, sparse
        return changed


def _anywhere_active(reports: Sequence[bytes]) -> list[bool]:
    return [not all(note & FROZEN for note in notes) for notes in zip(*reports, strict=True)]


def by_kind(kinds: Sequence[Kind], inside: Sequence[bool]) -> dict[Kind, list[int]]:
    """The positions of the parameters that go into buckets, by kind, in the reverse of the model's order: as backward goes."""
    members: dict[Kind, list[int]] = {}
    for position in reversed(range(len(kinds))):
        if inside[position]:
            members.setdefault(kinds[position], []).append(position)
    return members
