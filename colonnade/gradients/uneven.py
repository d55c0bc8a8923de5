"""Gradients that did not go the usual way: missing on some rank, late, sparse, or without a bucket.

Every rank writes one note per parameter (`SumState`). Nearly always all notes are alike, and a digest shows it; only where they
differ are the notes themselves exchanged (`GroupNotes`). Over NCCL, where the host must not wait, a few numbers that are sent with a
bucket take the place of digests (`PiggybackedFlags`). Whatever happened, the result equals one process on the joined batch
(`finish_uneven`): a parameter that got a gradient on any rank has the sum, a parameter that got none anywhere has `.grad` None, so
that the optimizer skips it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from struct import Struct

import torch
from torch import Tensor

from colonnade.comm.host_copy import HostCopy
from colonnade.comm.rank_group import GroupMemory, RankGroup
from colonnade.comm.torch_versions import all_gather_flat
from colonnade.errors import GradientError, listed
from colonnade.gradients.bucket import FAILED, FROZEN, MISSING, OUTSIDE, SPARSE, Bucket, BucketStorage, Buffer
from colonnade.gradients.sums import HALVES, Sum
from colonnade.gradients.transport import CollectiveTransport, LocalTransport
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.flat import flattened
from colonnade.texts import digest_of

# --- The state of one sum: buckets and notes ---


Places = dict[int, tuple[Bucket, int]]
"""Position of a parameter in its sum -> its bucket and its index in there."""

Kind = tuple[torch.dtype, torch.device]


class SumState:
    """The buckets of one sum, and what is known of its parameters.

    `buckets` are in the order in which they start, `laid_out` in that of memory. `notes` has one byte per parameter about the step
    that is being finished. While `recording`, the order in which gradients come is written down; buckets then start in the
    order in which they were complete on the first rank.
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
        """The buckets with how far through the sum each ends (0 to 1): the order in which buckets of several sums are interleaved."""
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
            self._storages[bucket.layout.dtype, bucket.layout.device].acquire_staging(bucket)
        notes = bucket.collect(early=early)
        for position in bucket.positions:
            note, before = notes.get(position, 0), self._started.get(position, MISSING)
            # A gradient is missing from a step if it is from all passes that were summed.
            self._started[position] = ((note | before) & ~MISSING) | (note & before & MISSING)

    def finish_staged(self) -> None:
        """End the sums of buckets that lie in staging memory."""
        for storage in self._storages.values():
            storage.finish_staged()

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


USE_ONE_FORM = (
    "use one form. A mean that cross-entropy has made counts as (sum, count): times 1.0 it is a plain mean, and where "
    "there is nothing to learn from give (0 * output.sum(), 0)"
)
_STEP = Struct("<q")
_NO_STEP = 1 << 48
"""The number of a step is below, the bits of a count above: ranks that gave means meet counts at the place of steps."""


class GroupNotes:
    """The notes of one group of ranks, for all its sums one after another."""

    def __init__(self, group: RankGroup, states: Sequence[SumState]) -> None:
        self.group, self.states = group, list(states)
        self._own: list[bytes] = []
        self._counts = b""
        self._reports: list[list[bytes]] | None = None

    def announce(self, step: int, counts: bool = False) -> None:
        """Send a digest of this rank's notes; does not wait. `counts`: its loss of the step was given as (sum, count)."""
        self._own, self._reports = [state.close_notes() for state in self.states], None
        self._counts = bytes([counts])
        digest = digest_of(b"".join(self._own) + self._counts)
        self.group.signal(_STEP.pack(step) + digest.to_bytes(8, "little"))

    def resolve(self) -> list[list[bytes]]:
        """Wait for the others: per sum, the notes of every rank in group order."""
        if self._reports is None:
            digests = self.group.collect()
            self._check_steps(digests)
            own = b"".join(self._own) + self._counts
            whole = [own] * self.group.size if len({*digests}) == 1 else self.group.gather_bytes(own)
            self._reports, start = [], 0
            for notes in self._own:
                self._reports.append([other[start : start + len(notes)] for other in whole])
                start += len(notes)
            self._check_forms([other[-1] for other in whole])
        return self._reports

    def _check_forms(self, counts: list[int]) -> None:
        """Where some ranks sum counts and others do not, the gradients have no common factor."""
        failed = any(notes and notes[0] & FAILED for reports in self._reports or () for notes in reports)
        if failed or len({*counts}) == 1:
            return
        of_form = [[rank for rank, one in zip(self.group.ranks, counts, strict=True) if one == form] for form in (0, 1)]
        raise GradientError(
            f"the loss is not of one form on all ranks: a mean on rank {listed(of_form[0])}; (sum, count) on rank "
            f"{listed(of_form[1])}; {USE_ONE_FORM}",
            code="C045",
        )

    def _check_steps(self, digests: list[bytes]) -> None:
        steps = [step for (step,) in map(_STEP.unpack_from, digests)]
        counting = [rank for rank, step in zip(self.group.ranks, steps, strict=True) if step > _NO_STEP]
        if counting:
            raise GradientError(
                f"rank {listed(counting)} adds up the counts of its losses, given as (sum, count), and rank "
                f"{listed(set(self.group.ranks).difference(counting))} gave a mean; {USE_ONE_FORM}",
                code="C045",
            )
        if len({*steps}) > 1:
            at = ", ".join(f"rank {rank}: {step}" for rank, step in zip(self.group.ranks, steps, strict=True))
            raise GradientError(
                f"ranks are not in the same gradient synchronisation ({at}); a rank has skipped or repeated one",
                code="C043",
            )


def notes_of_all(groups: Sequence[GroupNotes], step: int, counts: bool = False) -> list[list[bytes]]:
    """The notes of every rank about each sum, in the order of groups and their sums. Collective, and the host waits."""
    for notes in groups:
        notes.announce(step, counts)
    return [report for notes in groups for report in notes.resolve()]


def finish_uneven(state: SumState, reports: Sequence[bytes], factor: float | Tensor) -> dict[int, list[int]]:
    """Finish the parameters that `reports` (all ranks' notes) remark on, after the buckets are summed.

    Returns position -> global ranks that had no gradient while others did. Collective.
    """
    sum_, group, places = state.sum, state.group, state.places
    dense: list[int] = []
    absent: dict[int, set[int]] = {}
    uneven: dict[int, list[int]] = {}
    for position, notes in enumerate(zip(*reports, strict=True)):
        if not any(note & (MISSING | OUTSIDE | SPARSE) for note in notes):
            continue
        in_bucket = position in places and not all(note & (MISSING | SPARSE) for note in notes)
        outside = any(note & OUTSIDE for note in notes)
        sparse = any(note & SPARSE for note in notes)
        if sparse and sum_.sharding is not None:
            raise GradientError(
                f"the gradient of {sum_.names[position]!r} is sparse, and ZeRO shards dense gradients only; build its "
                f"layer with sparse=False, or turn zero off"
            )
        if outside or (sparse and in_bucket):
            dense.append(position)
        elif sparse:
            _sum_sparse(sum_, position, group, factor)
        elif in_bucket:
            bucket, index = places[position]
            if not bucket.is_sharded:
                bucket.attach(index)
        elif position in places:
            bucket, index = places[position]
            absent.setdefault(id(bucket), set()).add(index)
        if in_bucket or outside or sparse:
            uneven[position] = [r for r, note in zip(group.ranks, notes, strict=True) if note & MISSING]
    for bucket in state.buckets:
        bucket.absent = frozenset(absent.get(id(bucket), ()))
    _sum_dense(sum_, dense, group, places, factor)
    return {position: ranks for position, ranks in uneven.items() if ranks}


def explain(sum_: Sum, position: int, ranks: Sequence[int], step: int) -> str:
    """The message for the log about a parameter without gradient on some ranks."""
    return (
        f"step {step}: no gradient for {sum_.names[position]!r} on ranks {listed(ranks)}, "
        f"but on others of {listed(sum_.ranks)}: counted as zero (said once)"
    )


def _sum_dense(sum_: Sum, positions: Sequence[int], group: RankGroup, places: Places, factor: float | Tensor) -> None:
    """Sum what lies beside the buckets, and add it to what is in them."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for position in positions:
        tensor = local_part(sum_.parameters[position])
        kinds.setdefault((tensor.dtype, tensor.device), []).append(position)
    wide = None if sum_.options.reduce_dtype in HALVES else sum_.options.reduce_dtype
    plain = replace(sum_, sharding=None, options=replace(sum_.options, compress=None, reduce_dtype=wide))
    for dtype, device in sorted(kinds, key=str):
        extra = Bucket(plain, kinds[dtype, device], group.index)
        memory = GroupMemory(torch.zeros(extra.numel, dtype=dtype, device=device))
        buffer = Buffer(extra, memory)
        for parameter, view, position in zip(extra.parameters, buffer.views, extra.positions, strict=True):
            grad = parameter.grad
            if grad is not None and not _is_in_bucket(grad, places.get(position)):
                strided = grad if grad.layout is torch.strided else grad.to_dense()
                view.copy_(local_part(strided, parameter))
        transport = (LocalTransport if group.alone else CollectiveTransport)(extra, memory, group)
        transport.start()
        transport.finish(factor)
        for i, position in enumerate(extra.positions):
            _put(extra.parameters[i], buffer, i, places.get(position))


def _is_in_bucket(grad: Tensor, place: tuple[Bucket, int] | None) -> bool:
    if place is None:
        return False
    bucket, index = place
    return grad is bucket.grads[index]


def _put(parameter: Tensor, buffer: Buffer, i: int, place: tuple[Bucket, int] | None) -> None:
    if place is None:
        parameter.grad = buffer.grads[i]
        return
    bucket, index = place
    if not bucket.is_sharded:
        bucket.views[index].add_(buffer.views[i])
        bucket.attach(index)
        return
    parameter.grad = None
    flat = flattened(buffer.views[i])
    for span in bucket.spans:
        if span.index == index:
            into = bucket.gradient[span.at : span.at + span.numel]
            into.add_(flat[span.start : span.stop].to(into.device, into.dtype))


def _sum_sparse(sum_: Sum, position: int, group: RankGroup, factor: float | Tensor) -> None:
    """Sum sparse gradients as what they are: all ranks' entries, gathered, then those of equal index added."""
    parameter = sum_.parameters[position]
    own = _coo(parameter)
    counts = [int(count) for count in group.gather_objects(own._nnz())]
    indices = _gather_padded(own.indices().t().contiguous(), counts, group).t()
    values = _gather_padded(own.values(), counts, group)
    total = torch.sparse_coo_tensor(indices, values, parameter.shape).coalesce()
    total.values().mul_(factor)
    parameter.grad = total


def _coo(parameter: Tensor) -> Tensor:
    """The parameter's sparse gradient, its equal indices added up; without entries where there is none."""
    grad = parameter.grad
    if grad is not None:
        return grad.coalesce()
    dims = 1
    indices = torch.empty(dims, 0, dtype=torch.int64, device=parameter.device)
    values = torch.empty(0, *parameter.shape[dims:], dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape).coalesce()


def _gather_padded(rows: Tensor, counts: Sequence[int], group: RankGroup) -> Tensor:
    """The rows of all ranks, in group order."""
    if group.alone:
        return rows
    most = max(counts)
    padded = rows.new_zeros(most, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    gathered = rows.new_empty(group.size * most, *rows.shape[1:])
    if most:
        all_gather_flat(gathered, padded, group=group.group)
    blocks = gathered.view(group.size, most, *rows.shape[1:])
    return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])


# --- Flags in place of notes, where the host must not wait ---

_LAG = 2
"""After how many steps the numbers are read: the device always has a whole step of work left then."""
_STEP_MARKS = 4
DEVIATES, UNSTEADY, STEP = 0, 1, 2
FLAG_COUNT = STEP + _STEP_MARKS


class PiggybackedFlags:
    """Flags of a step that are summed over the world by a collective that is made anyway. The same decisions on every rank.

    With NCCL the host runs ahead of the device, and an agreement through the host would hold it up at every step. So a rank whose
    gradients come as they always did says nothing but that, in a few numbers that are summed with a bucket or with the norm. The
    host reads them two steps later. Until then a step in which a rank's gradients came otherwise (it deviates) is dropped on the
    device, by all ranks alike: no weight is ever wrong. From then on the ranks agree at every step.

    The numbers: does this rank deviate, is it not steady (it learns an order, or notes something odd), and a one at the place of
    the step's number modulo 4, so that ranks at different steps are noticed.
    """

    def __init__(self, device: torch.device) -> None:
        # [deviates][unsteady][mark], ready on the device: nothing is copied there at any step.
        self._all = torch.zeros(2, 2, _STEP_MARKS, FLAG_COUNT, dtype=torch.float64, device=device)
        self._all[1, :, :, DEVIATES] = self._all[:, 1, :, UNSTEADY] = 1.0
        for mark in range(_STEP_MARKS):
            self._all[:, :, mark, STEP + mark] = 1.0
        self._step = 0
        self._pending: deque[HostCopy] = deque()
        self._uneven = False
        self.steady = False
        """Whether the gradients of all ranks come as they always did, so that they need not agree at this step."""

    def begin(self) -> str | None:
        """Before the sums of a step end: decide whether it is a steady one. Returns a message for the log, if there is one."""
        self.steady, said = False, None
        if len(self._pending) < _LAG:
            return None
        deviates, unsteady, *marks = self._pending.popleft().read()
        if sum(mark > 0 for mark in marks) > 1:
            raise GradientError(
                f"ranks were not at the same step {_LAG} steps ago; a rank has skipped or repeated one. That step was dropped",
                code="C043",
            )
        if deviates > 0 and not self._uneven:
            self._uneven = True
            said = (
                f"step {self._step - _LAG} was dropped: on some rank other parameters had gradients than in the steps before. "
                f"From now on the ranks agree on that at every step, and none is dropped for it"
            )
        self.steady = not self._uneven and unsteady == 0
        return said

    def numbers(self, deviates: bool, unsteady: bool) -> Tensor:
        """The numbers of this rank's step; to be summed (or their maximum taken) over the world."""
        return self._all[int(deviates), int(unsteady), self._step % _STEP_MARKS]

    def all_deviate(self, summed: Tensor) -> bool:
        """After `take`, on a rank that deviates: whether all ranks do. Waits for the device.

        Then each rank knows that the others are here, and they can agree: the step is not dropped, it was only not steady.
        """
        numbers = summed[:FLAG_COUNT].tolist()
        if numbers[DEVIATES] != numbers[STEP + (self._step - 1) % _STEP_MARKS]:
            return False
        self._pending[-1] = HostCopy(self.numbers(False, unsteady=True))
        return True

    def take(self, summed: Tensor) -> Tensor:
        """Keep the sums of all ranks' numbers, for two steps later; 1.0, on the device, if the world drops the step."""
        self._pending.append(HostCopy(summed))
        mark = STEP + self._step % _STEP_MARKS
        self._step += 1
        others = summed[STEP:].sum() - summed[mark]
        return ((summed[DEVIATES] + others) > 0).float()
