"""Uneven gradients: gradients that are missing on some ranks, late, sparse, or of parameters without a bucket.

Each rank has one note per parameter and step (`SumState`). Nearly always the notes of all ranks are equal, and a digest shows it;
only if they differ, the notes themselves are exchanged (`GroupNotes`). Over NCCL, where the host must not wait, a few numbers
that are piggybacked on a bucket take the place of digests (`PiggybackedFlags`).

In every case the result equals a single process on the global batch (`finish_uneven`): a parameter with a gradient on any rank gets
the sum; a parameter without one on all ranks keeps `.grad` None, so that the optimizer skips it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from struct import Struct

import torch
from torch import Tensor

from colonnade.comm.groups import GroupMemory, RankGroup
from colonnade.comm.messages import HostCopy
from colonnade.comm.torch_versions import all_gather_flat
from colonnade.errors import GradientError, listed
from colonnade.gradients.bucket import FAILED, FROZEN, MISSING, OUTSIDE, SPARSE, Bucket, BucketStorage, Buffer
from colonnade.gradients.sums import HALVES, Sum
from colonnade.gradients.transport import CollectiveTransport, LocalTransport
from colonnade.parallel.flat import flattened
from colonnade.parallel.placement import local_part
from colonnade.texts import digest_of

# --- The state of one sum: buckets and notes ---


Places = dict[int, tuple[Bucket, int]]
"""Position of a parameter in its sum -> its bucket, and its index in the bucket."""

Kind = tuple[torch.dtype, torch.device]


class SumState:
    """The buckets of one sum, and the state of its parameters.

    - `buckets`: in the order in which they start; `laid_out`: in the order of memory.
    - `notes`: one byte per parameter, on its gradient in the step that is being finished.
    - `recording`: in the first step with a bucket layout the order of gradients is recorded; afterwards the buckets start in the
      order in which they were complete on the first rank.
    - `active`: the parameters that require a gradient on any rank.
    """

    def __init__(self, sum_: Sum, group: RankGroup) -> None:
        self.sum, self.group = sum_, group
        self._storages: dict[Kind, BucketStorage] = {}
        self._sparse: set[int] = set()
        self._required = [parameter.requires_grad for parameter in sum_.parameters]
        self._blank = bytes(0 if required else FROZEN for required in self._required)
        self._outside: list[int] = []
        self._last_reports = group.gather_bytes(self._blank) if self._blank else []
        self.active = _active_on_any_rank(self._last_reports)
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
        """Create buckets for all active parameters, in reverse model order; existing gradients are moved into them.

        Collective over the ranks of the sum if memory must grow.
        """
        # Gradients that are views of the old buckets are copied out, since their memory is used again.
        for bucket in self.buckets:
            for parameter, grad in zip(bucket.parameters, bucket.grads, strict=True):
                if parameter.grad is grad:
                    parameter.grad = grad.clone()
        self.buckets, self.laid_out, self.places = [], [], {}
        for storage in self._storages.values():
            storage.clear()
        self._kinds = [(parameter.dtype, parameter.device) for parameter in self.sum.parameters]
        bucketed = [active and at not in self._sparse for at, active in enumerate(self.active)]
        members = by_kind(self._kinds, bucketed)
        self._outside = [at for at, has_bucket in enumerate(bucketed) if not has_bucket]
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

    def start(self, bucket: Bucket, *, early: bool) -> None:
        """Start the reduction of a bucket, and write notes for gradients outside the bucket."""
        self.collect(bucket, early=early)
        bucket.send()

    def collect(self, bucket: Bucket, *, early: bool) -> None:
        """Complete the buffer of a bucket without starting the reduction, and write notes for gradients outside the bucket."""
        if not bucket.keeps_gradients:
            self._storages[bucket.layout.dtype, bucket.layout.device].acquire_staging(bucket)
        notes = bucket.collect(early=early)
        for position in bucket.positions:
            note, before = notes.get(position, 0), self._started.get(position, MISSING)
            # A gradient is missing from the step only if it is missing from every pass that was reduced.
            self._started[position] = ((note | before) & ~MISSING) | (note & before & MISSING)

    def finish_staged(self) -> None:
        """Finish the reductions of buckets in staging buffers."""
        for storage in self._storages.values():
            storage.finish_staged()

    # -- the order in which gradients arrive --------------------------------------------------------------

    def begin_pass(self) -> None:
        """Prepare for a backward pass; call it before each.

        Raises GradientError if the dtype or device of a parameter has changed.
        """
        kinds = [(parameter.dtype, parameter.device) for parameter in self.sum.parameters]
        if kinds != self._kinds:
            at = next(at for at, (old, new) in enumerate(zip(self._kinds, kinds, strict=True)) if old != new)
            old, new = (f"{dtype} on {device}" for dtype, device in (self._kinds[at], kinds[at]))
            raise GradientError(
                f"the parameter {self.sum.names[at]!r} was {old} at initialize() and is {new} now. Move or convert "
                "the model before initialize()."
            )
        self._fresh = True

    def record(self, position: int) -> None:
        """Record that the gradient of the parameter at `position` has arrived, for the order of buckets."""
        # The order of the last pass counts, so a pass starts a new record; but only once it has a gradient at all.
        if self._fresh:
            self._fired, self._fresh = {}, False
        # Removed and added again, so that the dictionary is in the order of the last arrivals.
        self._fired[position] = self._fired.pop(position, 0) + 1

    def learn_order(self) -> None:
        """Set the order of buckets, and the gradients that each bucket waits for, from the recorded step.

        Collective over the ranks of the sum.
        """
        arrival = {position: at for at, position in enumerate(self._fired)}
        complete = []
        for bucket in self.buckets:
            arrived = [i for i, position in enumerate(bucket.positions) if position in arrival]
            last = max(arrived, key=lambda i: arrival[bucket.positions[i]], default=0)
            bucket.expected, bucket.last = arrived, last
            bucket.firings = self._fired.get(bucket.positions[last], 1)
            complete.append(arrival.get(bucket.positions[last], len(arrival)))
            bucket.recording = False
        # All ranks must start buckets in the same order, so that of the first rank holds for all.
        order = sorted(range(len(complete)), key=complete.__getitem__)
        order_of_first, *_ = self.group.gather_objects(order)
        self.buckets = [self.buckets[at] for at in order_of_first]
        self.recording = False

    # -- notes --------------------------------------------------------------------------------------------

    def open_notes(self, failed: bool) -> None:
        """Start the notes of a step at the end of backward: note gradients without a bucket, and late gradients."""
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
        """Complete and return the notes of this step. Call it when all buckets are collected."""
        for position, note in self._started.items():
            self.notes[position] |= note
        self._started.clear()
        return bytes(self.notes)

    def failed(self, reports: Sequence[bytes]) -> list[int]:
        """The ranks on which backward failed, from the notes of all ranks."""
        return [rank for rank, notes in zip(self.group.ranks, reports, strict=True) if notes and notes[0] & FAILED]

    @property
    def remarkable(self) -> bool:
        """Whether the notes report anything other than frozen parameters."""
        return self.notes != self._blank

    def adapt(self, reports: list[bytes]) -> bool:
        """Update the active and the sparse parameters from the notes of all ranks. Returns whether the buckets must change."""
        if self.sum.sharding is not None or reports == self._last_reports:
            return False
        self._last_reports = reports
        active = _active_on_any_rank(reports)
        sparse = {i for notes in reports for i, note in enumerate(notes) if note & SPARSE} | self._sparse
        changed = active != self.active or sparse != self._sparse
        self.active, self._sparse = active, sparse
        return changed


def _active_on_any_rank(reports: Sequence[bytes]) -> list[bool]:
    return [not all(note & FROZEN for note in notes) for notes in zip(*reports, strict=True)]


def by_kind(kinds: Sequence[Kind], bucketed: Sequence[bool]) -> dict[Kind, list[int]]:
    """Group the positions of the `bucketed` parameters by dtype and device, in reverse model order (about the order of
    backward)."""
    members: dict[Kind, list[int]] = {}
    for position in reversed(range(len(kinds))):
        if bucketed[position]:
            members.setdefault(kinds[position], []).append(position)
    return members


USE_ONE_FORM = (
    "use one form on all ranks. The mean of F.cross_entropy counts as (sum, count); `1.0 * mean` makes it a plain mean. "
    "On a rank without labels, give (0 * output.sum(), 0)"
)
_STEP = Struct("<q")
_NO_STEP = 1 << 48
"""Numbers of steps are below. A rank that exchanges counts of losses has the bits of a float at the place of the step, which are
above."""


class GroupNotes:
    """The exchange of notes within one group of ranks, for all sums over this group."""

    def __init__(self, group: RankGroup, states: Sequence[SumState]) -> None:
        self.group, self.states = group, list(states)
        self._own: list[bytes] = []
        self._counts = b""
        self._reports: list[list[bytes]] | None = None

    def announce(self, step: int, counts: bool = False) -> None:
        """Send a digest of this rank's notes, without a wait. `counts`: the loss of this step was given as (sum, count)."""
        self._own, self._reports = [state.close_notes() for state in self.states], None
        self._counts = bytes([counts])
        digest = digest_of(b"".join(self._own) + self._counts)
        self.group.signal(_STEP.pack(step) + digest.to_bytes(8, "little"))

    def resolve(self) -> list[list[bytes]]:
        """Wait for the digests of the other ranks.

        Returns:
            Per sum, the notes of every rank in group order.

        Raises:
            GradientError: The ranks are at different steps, or have different forms of the loss.
        """
        if self._reports is not None:
            return self._reports
        ranks = self.group.ranks

        # A message of another step, or of another collective: a rank that gave (sum, count) exchanges counts where the others
        # exchange digests.
        digests = self.group.collect()
        steps = [step for (step,) in map(_STEP.unpack_from, digests)]
        counting = [rank for rank, step in zip(ranks, steps, strict=True) if step > _NO_STEP]
        if counting:
            raise GradientError(
                f"rank {listed(counting)} gave the loss as (sum, count), and rank "
                f"{listed(set(ranks).difference(counting))} gave it as a mean. To correct this, {USE_ONE_FORM}",
                code="C045",
            )
        if len({*steps}) > 1:
            at = ", ".join(f"rank {rank}: {step}" for rank, step in zip(ranks, steps, strict=True))
            raise GradientError(
                f"ranks are not at the same gradient synchronisation ({at}), because a rank has skipped or repeated "
                "one. Call backward() and step() equally often on every rank.",
                code="C043",
            )

        # Equal digests: every rank has the notes of this one, which are nearly always so.
        own = b"".join(self._own) + self._counts
        of_ranks = [own] * self.group.size if len({*digests}) == 1 else self.group.gather_bytes(own)
        self._reports, start = [], 0
        for notes in self._own:
            self._reports.append([report[start : start + len(notes)] for report in of_ranks])
            start += len(notes)

        # If some ranks sum counts and others do not, there is no common factor for the gradients. A rank whose backward failed
        # may have had no loss; then the step is dropped anyway.
        counts = [report[-1] for report in of_ranks]
        failed = any(notes and notes[0] & FAILED for reports in self._reports for notes in reports)
        if not failed and len({*counts}) > 1:
            means, pairs = ([r for r, form in zip(ranks, counts, strict=True) if form == kind] for kind in (0, 1))
            raise GradientError(
                f"the loss does not have the same form on all ranks. It is a mean on rank {listed(means)} and (sum, "
                f"count) on rank {listed(pairs)}. To correct this, {USE_ONE_FORM}",
                code="C045",
            )
        return self._reports


def notes_of_all(groups: Sequence[GroupNotes], step: int, counts: bool = False) -> list[list[bytes]]:
    """The notes of every rank for each sum, ordered by group, then by sum.

    Collective over the ranks of each group; the host waits.
    """
    for of_group in groups:
        of_group.announce(step, counts)
    return [report for of_group in groups for report in of_group.resolve()]


def finish_uneven(state: SumState, reports: Sequence[bytes], factor: float | Tensor) -> dict[int, list[int]]:
    """Reduce the gradients outside buckets, after the buckets of the sum. Collective over the ranks of the sum.

    Args:
        state: The sum.
        reports: The notes of all its ranks.
        factor: The factor of the step, with the divisor of the sum.

    Returns:
        {position of a parameter: global ranks without a gradient}, for parameters that had a gradient on other ranks.
    """
    sum_, group, places = state.sum, state.group, state.places
    dense: list[int] = []
    absent: dict[int, set[int]] = {}
    uneven: dict[int, list[int]] = {}

    # Every decision follows from the notes of all ranks, never from those of this rank: so all ranks make the same collectives.
    for position, notes in enumerate(zip(*reports, strict=True)):
        if not any(note & (MISSING | OUTSIDE | SPARSE) for note in notes):
            continue
        in_bucket = position in places and not all(note & (MISSING | SPARSE) for note in notes)
        outside = any(note & OUTSIDE for note in notes)
        sparse = any(note & SPARSE for note in notes)
        if sparse and sum_.sharding is not None:
            raise GradientError(
                f"the gradient of {sum_.names[position]!r} is sparse, but ZeRO shards only dense gradients. Build "
                "the layer with sparse=False, or turn zero off."
            )
        # Outside its bucket on some rank: reduced densely, and added to the bucket's sum of the other ranks. Sparse on every rank
        # that has it: stays sparse. In the bucket on some ranks (zero on the others): the sum is there, only `.grad` must be set.
        # On no rank: `.grad` stays None, as in a single process.
        if outside or (sparse and in_bucket):
            dense.append(position)
        elif sparse:
            # All ranks' entries are gathered, and those of equal index added. A rank without a gradient gives no entries.
            parameter = sum_.parameters[position]
            grad = parameter.grad
            if grad is None:
                indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
                entries = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
                grad = torch.sparse_coo_tensor(indices, entries, parameter.shape)
            own = grad.coalesce()
            counts = [int(count) for count in group.gather_objects(own._nnz())]
            indices = _gather_padded(own.indices().t().contiguous(), counts, group).t()
            values = _gather_padded(own.values(), counts, group)
            total = torch.sparse_coo_tensor(indices, values, parameter.shape).coalesce()
            total.values().mul_(factor)
            parameter.grad = total
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

    # The dense gradients outside the buckets are reduced in further buckets, for this step only: in their own dtype (or a wider
    # one), and unsharded, since the owner of each element is known only in the bucket that they belong to.
    kinds: dict[Kind, list[int]] = {}
    for position in dense:
        tensor = local_part(sum_.parameters[position])
        kinds.setdefault((tensor.dtype, tensor.device), []).append(position)
    wide = None if sum_.options.reduce_dtype in HALVES else sum_.options.reduce_dtype
    plain = replace(sum_, sharding=None, options=replace(sum_.options, compress=None, reduce_dtype=wide))
    for dtype, device in sorted(kinds, key=str):
        extra = Bucket(plain, kinds[dtype, device], group.index)
        memory = GroupMemory(torch.zeros(extra.numel, dtype=dtype, device=device))
        buffer = Buffer(extra, memory)
        for parameter, view, position in zip(extra.parameters, buffer.views, extra.positions, strict=True):
            grad, place = parameter.grad, places.get(position)
            # A gradient that is in its bucket has been reduced there; this rank adds zeros here.
            if grad is None or (place is not None and grad is place[0].grads[place[1]]):
                continue
            strided = grad if grad.layout is torch.strided else grad.to_dense()
            view.copy_(local_part(strided, parameter))
        transport = (LocalTransport if group.alone else CollectiveTransport)(extra, memory, group)
        transport.start()
        transport.finish(factor)

        # Without a bucket, the sum is the gradient. With one, it is added to the bucket's sum; to the slice that this rank owns,
        # if the bucket is sharded.
        for parameter, view, grad, position in zip(
            extra.parameters, buffer.views, buffer.grads, extra.positions, strict=True
        ):
            if position not in places:
                parameter.grad = grad
                continue
            bucket, index = places[position]
            if not bucket.is_sharded:
                bucket.views[index].add_(view)
                bucket.attach(index)
                continue
            parameter.grad = None
            flat = flattened(view)
            for span in bucket.spans:
                if span.index == index:
                    into = bucket.gradient[span.at : span.at + span.numel]
                    into.add_(flat[span.start : span.stop].to(into.device, into.dtype))
    return {position: ranks for position, ranks in uneven.items() if ranks}


def explain(sum_: Sum, position: int, ranks: Sequence[int], step: int) -> str:
    """The log message for a parameter that had no gradient on some ranks."""
    return (
        f"step {step}: ranks {listed(ranks)} have no gradient for {sum_.names[position]!r}, but other ranks of "
        f"{listed(sum_.ranks)} have one. The missing gradients count as zero (logged once)."
    )


def _gather_padded(rows: Tensor, counts: Sequence[int], group: RankGroup) -> Tensor:
    """The rows of all ranks, in group order; `counts` are their numbers of rows."""
    if group.alone:
        return rows
    # An all-gather needs equal shapes, so every rank pads to the largest count.
    longest = max(counts)
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    gathered = rows.new_empty(group.size * longest, *rows.shape[1:])
    if longest:
        all_gather_flat(gathered, padded, group=group.group)
    blocks = gathered.view(group.size, longest, *rows.shape[1:])
    return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])


# --- Flags in place of notes, where the host must not wait ---

_LAG = 2
"""The number of steps after which the flags are read: the device then still has a full step of work queued."""
_STEP_SLOTS = 4
DEVIATES, UNSTEADY, STEP = 0, 1, 2
FLAG_COUNT = STEP + _STEP_SLOTS


class PiggybackedFlags:
    """Flags of a step that are summed over the world as part of another collective, so that all ranks decide alike without a
    further collective.

    With NCCL the host runs ahead of the device, and a comparison of notes through the host would stall it in every step. So a rank
    whose gradients arrive as in earlier steps sends only a few numbers, summed with a bucket or with the norm, and the host reads
    the sums two steps later. If the gradients of a rank arrive differently (the rank deviates), all ranks skip the step
    on the device, so no weight is ever wrong. Afterwards the ranks compare notes in every step.

    The numbers: 1 if this rank deviates; 1 if it is not steady (it records an order, or its notes are irregular); and a 1 in the
    slot of the step's number modulo 4, which shows whether ranks are at different steps.
    """

    def __init__(self, device: torch.device) -> None:
        # [deviates][unsteady][slot]: all combinations are on the device from the start, so that no step copies anything there.
        self._all = torch.zeros(2, 2, _STEP_SLOTS, FLAG_COUNT, dtype=torch.float64, device=device)
        self._all[1, :, :, DEVIATES] = self._all[:, 1, :, UNSTEADY] = 1.0
        for slot in range(_STEP_SLOTS):
            self._all[:, :, slot, STEP + slot] = 1.0
        self._step = 0
        self._pending: deque[HostCopy] = deque()
        self._uneven = False
        self.steady = False
        """Whether the gradients of all ranks arrive as in earlier steps, so that this step needs no comparison of notes."""

    def begin(self) -> str | None:
        """Decide whether the ranks exchange only flags in this step (a steady step). Called before the reductions finish.

        Returns:
            A message for the log, or None.

        Raises:
            GradientError: Ranks were at different steps.
        """
        self.steady, message = False, None
        if len(self._pending) < _LAG:
            return None
        deviates, unsteady, *slots = self._pending.popleft().read()
        if sum(count > 0 for count in slots) > 1:
            raise GradientError(
                f"ranks were at different steps {_LAG} steps ago, because a rank has skipped or repeated a step. All "
                "ranks skipped that step. Call step() equally often on every rank.",
                code="C043",
            )
        if deviates > 0 and not self._uneven:
            self._uneven = True
            message = (
                f"step {self._step - _LAG} was skipped, because the set of parameters with a gradient has "
                "changed on some rank. From now on the ranks compare these sets in every step, and no other step "
                "is skipped for this reason"
            )
        self.steady = not self._uneven and unsteady == 0
        return message

    def numbers(self, deviates: bool, unsteady: bool) -> Tensor:
        """The flags of this rank for this step as a tensor, which is reduced over the world by sum or maximum."""
        return self._all[int(deviates), int(unsteady), self._step % _STEP_SLOTS]

    def all_deviate(self, summed: Tensor) -> bool:
        """Whether all ranks deviate; called after `take`, on a rank that deviates. The host waits for the device.

        If all ranks deviate, every rank calls this method, so they can compare notes: the step counts as unsteady and is not
        skipped.
        """
        # The slot of the step has counted the ranks.
        numbers = summed[:FLAG_COUNT].tolist()
        if numbers[DEVIATES] != numbers[STEP + (self._step - 1) % _STEP_SLOTS]:
            return False
        self._pending[-1] = HostCopy(self.numbers(False, unsteady=True))
        return True

    def take(self, summed: Tensor) -> Tensor:
        """Take the sums of the flags over all ranks. The host reads them two steps later.

        Returns:
            A device tensor: 1.0 if all ranks must skip the step, else 0.0.
        """
        self._pending.append(HostCopy(summed))
        slot = STEP + self._step % _STEP_SLOTS
        self._step += 1
        at_other_steps = summed[STEP:].sum() - summed[slot]
        return ((summed[DEVIATES] + at_other_steps) > 0).float()
