"""The synchroniser: performs all gradient reductions of a rank, overlapped with backward where this saves time.

`Synchroniser` owns flat buckets, moves gradients into them as backward produces them, and starts the reduction of a bucket as soon
as it is full in the last micro-batch. `wait` is the end of a step, in one piece: it starts the remaining buckets, compares the
notes of the ranks, finishes all reductions, and returns a `StepOutcome`.

The order of gradients affects speed only, never the result. If a bucket was started too early, a late gradient stays outside it;
`wait` finds it and adds it on all ranks (`uneven.finish_uneven`). Over NCCL the host must not wait for other ranks, so in steady
state the ranks exchange flags on the device instead of notes: a step with a late gradient is then skipped on all ranks, and from
then on the ranks compare notes in every step (`uneven.PiggybackedFlags`).
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.comm.groups import RankGroup, keep_heap
from colonnade.errors import GradientError
from colonnade.gradients.bucket import FAILED, OUTSIDE, SPARSE, Bucket, in_starting_order, last_over_ranks
from colonnade.gradients.gather import give_back
from colonnade.gradients.sums import Sum
from colonnade.gradients.uneven import GroupNotes, PiggybackedFlags, SumState, explain, finish_uneven, notes_of_all
from colonnade.parallel.placement import local_part
from colonnade.texts import digest_of

# --- Before the first step: groups of ranks, and a check that their sums are equal ---

Log = Callable[[str], None]


def open_groups(sums: Sequence[Sum], log: Log) -> dict[tuple[int, ...], RankGroup]:
    """Make one `RankGroup` per set of ranks, with shared memory if the options request it. Collective over the ranks of each sum.

    Args:
        sums: The sums of this rank.
        log: Called with a message if an option has no effect.

    Raises:
        GradientError: A parameter is in two sums, a divisor is not positive, or shared memory is required and not available.
    """
    names: dict[int, str] = {}
    for sum_ in sums:
        for name, parameter in zip(sum_.names, sum_.parameters, strict=True):
            if id(parameter) in names:
                raise GradientError(
                    f"{name!r} is in two reductions; in the first its name is {names[id(parameter)]!r}. Join the two "
                    "into one reduction over all their ranks."
                )
            names[id(parameter)] = name
        if not sum_.divisor > 0:
            raise GradientError(f"a divisor must be greater than 0, not {sum_.divisor!r}")

    # Errors are kept until the loop ends: other ranks wait for this rank in its other groups. All ranks open their groups in
    # the order of ranks, so that no two wait for each other.
    groups, errors = {}, []
    for ranks in sorted({sum_.ranks for sum_ in sums}):
        of_group = [sum_ for sum_ in sums if sum_.ranks == ranks]
        groups[ranks] = group = RankGroup(ranks, of_group[0].group, log)
        on_cpu = any(parameter.device.type == "cpu" for sum_ in of_group for parameter in sum_.parameters)
        sharing = [sum_.options for sum_ in of_group if sum_.options.shared_memory is not False]
        if group.alone or not on_cpu or not sharing:
            continue
        try:
            group.share_memory(must=any(options.shared_memory is True for options in sharing))
        except GradientError as error:
            errors.append(error)
        narrow = [options.narrow for options in sharing if options.narrow is not None]
        if group.sockets is not None and narrow:
            log(
                f"{narrow[0]} has no effect in shared memory, where nothing is sent: gradients are summed in their own dtype"
            )
    if errors:
        for group in groups.values():
            group.close()
        raise errors[0]
    return groups


def check_alike(sums: Sequence[Sum], groups: Mapping[tuple[int, ...], RankGroup]) -> None:
    """Compare parameters and options of the sums between the ranks of each group. Collective over the ranks of each group.

    Raises:
        GradientError: The parameters or options differ. Raised on every rank of the group, with the first difference.
    """
    errors = []
    for ranks, group in sorted(groups.items()):
        # (name, properties that must be equal on all ranks), for each sum and each of its parameters.
        table: list[tuple[str, str]] = []
        for sum_ in (sum_ for sum_ in sums if sum_.ranks == ranks):
            options = ", ".join(f"{field.name}={getattr(sum_.options, field.name)}" for field in fields(sum_.options))
            sharding = "" if sum_.sharding is None else f", {sum_.sharding}"
            table += [("options", f"{options}{sharding}"), ("divisor", f"{sum_.divisor:g}")]
            labels = sum_.labels or ("",) * len(sum_.names)
            for name, parameter, label in zip(sum_.names, sum_.parameters, labels, strict=True):
                local = local_part(parameter)
                table.append((name, f"{tuple(local.shape)} {local.dtype} {local.device.type}{label}"))

        # Only digests are sent, unless they differ. Names are left out: a tied weight has another name at each stage.
        if len(set(group.gather_objects(digest_of(json.dumps([text for _, text in table]))))) > 1:
            errors.append(_difference(group, group.gather_objects(table)))
    if errors:
        raise GradientError(errors[0])


def _difference(group: RankGroup, tables: list[list[list[Any]]]) -> str:
    """The message that names the first differing entry and the two ranks."""
    first = tables[0]
    for rank, table in zip(group.ranks, tables, strict=True):
        for (name, value), (other_name, other) in zip(first, table, strict=False):
            if value != other:
                return (
                    f"ranks {group.ranks[0]} and {rank} would not sum the same gradients: "
                    f"{name!r} is {value}, {other_name!r} is {other}"
                )
        if len(table) != len(first):
            extra = (table if len(table) > len(first) else first)[min(len(table), len(first))][0]
            return (
                f"ranks {group.ranks[0]} and {rank} have {len(first)} and {len(table)} entries to sum; "
                f"the first that only one of them has is {extra!r}"
            )
    return "ranks would not sum the same gradients"


_log: Log = logging.getLogger("colonnade").info


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of the reductions of one step, equal on every rank of a sum."""

    scale: float | Tensor | None = None
    """The factor that the gradients were multiplied by, in addition to their divisors; None for 1."""
    failed_ranks: Sequence[int] = ()
    """The ranks whose backward failed; if there are any, all gradients are None."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """By failed rank, the reason, where it gave one."""
    drop_flag: Tensor | None = None
    """1.0 on the device if all ranks skip the step; None if the flags were not sent with a bucket."""
    unsent_flags: Tensor | None = None
    """Piggybacked flags of this rank that no bucket could carry: the caller sums them over the world, with the norm."""


class Synchroniser:
    """Performs all sums of a model. A model has a single synchroniser, so that the collectives of a group have one order.

    Call `prepare(last)` before each backward pass, `end_backward()` after it, and `wait()` before gradients are used: on every
    rank, the same number of times. After `wait`, `.grad` is reduced and, unless sparse or None, a view of a bucket. With a
    sharded sum the buckets' shards are reduced, and `.grad` is None.

    `generation` counts changes of the bucket layout. The layout changes if parameters are frozen or unfrozen, or turn out to have
    sparse gradients.

    Args:
        sums: The sums of this rank.
        log: Called with messages for the log.
    """

    def __init__(self, sums: Sequence[Sum], *, log: Log = _log) -> None:
        self.generation = 0
        self.buckets: list[Bucket] = []
        self.unprepared_gradients = False
        """Whether gradients arrived from a backward pass without `prepare`: these are not reduced."""
        self._log = log
        # In the same order on every rank: each has its own subset of the sums, and opening groups is collective.
        sums = sorted(sums, key=lambda sum_: sum_.order)
        self.groups = open_groups(sums, log)
        check_alike(sums, self.groups)
        self.parameters = {id(parameter) for sum_ in sums for parameter in sum_.parameters}
        self._states = [SumState(sum_, self.groups[sum_.ranks]) for sum_ in sums]
        self._group_notes = [
            GroupNotes(group, [state for state in self._states if state.group is group])
            for _, group in sorted(self.groups.items())
        ]
        self._state_of: dict[int, SumState] = {}
        self._last_over_ranks: list[Bucket] = []
        # The buckets that can carry piggybacked numbers: only those over the whole world.
        self._first_to_all: Bucket | None = None
        self._last_to_all: Bucket | None = None
        self._handles: list[Any] = []
        self._last = self._pass_open = False
        self._scale_of: Callable[[Tensor], Tensor] | None = None
        self._failure: str | None = None  # the reason why backward failed on this rank, "" without one
        self._flags: PiggybackedFlags | None = None
        # The last notes that were compared, (own notes, notes of every rank) per sum; and whether losses were (sum, count).
        self._agreed: list[tuple[bytes, list[bytes]]] = []
        self._counted = False
        # (bucket, its gradients with their version counters) at the end of backward, for `check_untouched`.
        self._ended: list[tuple[Bucket, list[tuple[Tensor | None, int | None]]]] = []
        self._step = 0
        self._reported: set[tuple[int, int]] = set()
        self._arrange()
        keep_heap()

    @property
    def layout(self) -> list[Bucket]:
        """All buckets in the order of their memory. (The attribute `buckets` has them in the order in which they start.)"""
        return [bucket for state in self._states for bucket in state.laid_out]

    @property
    def host_waits(self) -> bool:
        """Whether the host waits for the reductions anyway, so that a comparison of notes needs no additional wait."""
        return any(bucket.transport.host_waits for bucket in self.buckets)

    def agree_by(self, flags: PiggybackedFlags) -> None:
        """Replace the exchange of notes, for which the host waits, by `flags` that are summed with the reductions; the caller
        skips steps on the device."""
        self._flags = flags

    # -- before and during backward -------------------------------------------------------------------------

    def prepare(self, last: bool) -> None:
        """Prepare for a backward pass; `last` is True for the last micro-batch of a step. Call it before each backward pass."""
        if self._pass_open and not self._last:
            self._end_pass()
        self._last, self._pass_open, self._ended = last, True, []
        self.unprepared_gradients = False
        for state in self._states:
            state.begin_pass()
        for bucket in self.buckets:
            if not bucket.started:
                bucket.begin()

    @torch.no_grad()
    def carry(self, numbers: Tensor, scale_of: Callable[[Tensor], Tensor]) -> bool:
        """Sum two numbers over the world in the collective of the first bucket; `wait` multiplies the gradients by
        `scale_of(sums)`.

        Call between `prepare` and the end of the last backward pass of a step.

        Returns:
            False, on all ranks, if no bucket can carry the numbers; else True.
        """
        if self._first_to_all is not None:
            self._first_to_all.tail[-len(numbers) :].copy_(numbers)
            self._scale_of = scale_of
        return self._first_to_all is not None

    @torch.no_grad()
    def end_backward(self) -> None:
        """Start the buckets that other ranks may have started during their backward pass. Call it after each backward pass.

        Without it, other ranks could wait for this rank in these buckets. After this call the order of collectives is the same on
        all ranks. After the last pass of a step, gradients must not be changed until `wait`.
        """
        if not self._last:
            if self._pass_open:  # False if the step was abandoned between two passes
                self._end_pass()
            self._pass_open = False
            return
        self._start_early()
        self._ended = [(bucket, bucket.written()) for bucket in self.buckets if not bucket.started]

    def check_untouched(self) -> None:
        """Raise GradientError if gradients were changed since backward, because the buckets that were already sent do not have
        the change.

        Called before the first handler runs; from then on a handler may change the gradients that it is responsible for.
        """
        ended, self._ended = self._ended, []
        for bucket, written in ended:
            for name, before, now in zip(bucket.names, written, bucket.written(), strict=True):
                (was, writes), (grad, writes_now) = before, now
                if was is not grad or writes != writes_now:
                    raise GradientError(
                        f"the gradient of {name!r} was changed between backward and step, before it was summed over "
                        "the ranks. To clip, set clip_grad_norm in the config and do not call "
                        "torch.nn.utils.clip_grad_norm_. For any other change write a gradient handler.",
                        code="C046",
                    )

    def fail(self, why: str = "") -> None:
        """Record that backward failed on this rank, and why.

        In the next `wait`, all ranks get the reason and drop their gradients.
        """
        self._failure = why
        self._last = self._pass_open = True

    # -- the end of a step ----------------------------------------------------------------------------------

    @torch.no_grad()
    def wait(self, scale: float | Tensor | None = None, *, counts: bool = False) -> StepOutcome:
        """Finish all reductions of a step. Collective over the ranks of each sum.

        Args:
            scale: An additional factor for the gradients of this step, unless `carry` derives it from numbers of all ranks.
            counts: Whether this rank's loss was given as (sum, count); the losses on all ranks of a sum must have the same form.

        Raises:
            GradientError: The ranks are at different steps, or have different forms of the loss.
        """
        # Gradients outside the buckets are noted first, while it is known why they are outside: if a bucket was sent during
        # backward, its `.grad` were None since then, so a gradient there now is late.
        failed, flags = self._failure is not None, self._flags
        for state in self._states:
            state.open_notes(failed)

        # All remaining buckets start now, in the order that is the same on all ranks. If flags are sent with the last bucket, it
        # is collected but not sent yet: the flags depend on the notes, which are complete only when every bucket is collected.
        self._start_early()
        carrier = self._last_to_all if flags is not None else None
        self._start_rest([bucket for bucket in self.buckets if bucket is not carrier])
        if carrier is not None:
            self._state_of[id(carrier)].collect(carrier, early=False)
        for state in self._states:
            state.finish_staged()

        # Ranks compare their notes. If the host waits for the sums anyway (gloo, shared memory), a digest is sent now and the
        # answers are read after the sums. With flags (NCCL) the host must not wait: while all ranks are steady, each assumes
        # that all notes equal those of the previous steps, and flags a deviation, for which all ranks skip the step.
        states = [state for notes in self._group_notes for state in notes.states]
        reports: list[list[bytes]] = []
        numbers: Tensor | None = None
        deviates = False
        if flags is None:
            for notes in self._group_notes:
                notes.announce(self._step, counts)
        else:
            message = flags.begin()
            if message is not None:
                self._log(message)
            if flags.steady:
                notes_now = [state.close_notes() for state in states]
                deviates = failed or counts != self._counted or notes_now != [own for own, _ in self._agreed]
                numbers = flags.numbers(deviates, unsteady=False)
            else:
                found = notes_of_all(self._group_notes, self._step, counts)
                agreed = [(bytes(state.notes), report) for state, report in zip(states, found, strict=True)]
                # Late, sparse and failed gradients need the host in every step, so such steps cannot become the steady state.
                irregular = any(
                    note & (OUTSIDE | SPARSE | FAILED) for _, report in agreed for notes in report for note in notes
                )
                learns = any(state.recording for state in self._states) or counts != self._counted
                numbers = flags.numbers(False, unsteady=irregular or learns or agreed != self._agreed)
                self._agreed, self._counted = agreed, counts
            reports = [report for _, report in self._agreed]
        if carrier is not None and numbers is not None:
            carrier.tail[: len(numbers)].copy_(numbers)
            carrier.send()

        # Numbers that came with the first bucket determine the factor of the step. So they are read before any bucket is
        # finished: the division of each bucket then applies the factor, at no further cost.
        if self._scale_of is not None and self._first_to_all is not None:
            self._first_to_all.transport.wait()
            carried = self._first_to_all.tail[-2:]
            scale = self._scale_of(carried.double())
            carried.zero_()
        factor = 1.0 if scale is None else scale

        # In shared memory a rank reads the buffers of the others, so it first waits until their gradients are complete, which
        # their answers about notes imply. It also writes to their buffers, so at the end all wait until all have written.
        sharing = [of_group for of_group in self._group_notes if of_group.group.sockets is not None]
        for of_group in sharing:
            of_group.resolve()
        for bucket in self.buckets:
            if bucket.keeps_gradients:
                bucket.finish(factor)
            elif scale is not None:  # finished with factor 1 when its staging buffer was needed, or above
                bucket.rescale(scale)
        written = [
            of_group.group for of_group in sharing if any(state.sum.sharding is None for state in of_group.states)
        ]
        for group in written:
            group.signal(b"d")
        for group in written:
            group.collect()

        # The notes of all ranks. If every rank flags a deviation at once, as when all freeze a layer, no step is skipped: then
        # each rank knows that all others compare their notes here, too.
        drop_flag: Tensor | None = None
        if flags is not None and numbers is not None and carrier is not None:
            sent, numbers = len(numbers), None
            drop_flag = flags.take(carrier.tail[:sent].double())
            if deviates and flags.all_deviate(carrier.tail):
                drop_flag, reports = None, notes_of_all(self._group_notes, self._step, counts)
        if flags is None:
            reports = [report for of_group in self._group_notes for report in of_group.resolve()]
        pairs = list(zip(states, reports, strict=True))

        # If backward failed on a rank, the sums lack its gradients and are unusable: all ranks drop them and learn the reason.
        # The exchange keeps a rank from writing to shared memory for the next step while another still reads it.
        failed_ranks = sorted({rank for state, report in pairs for rank in state.failed(report)})
        reasons: dict[int, str] = {}
        for bucket in self.buckets:
            bucket.started = False
        if failed_ranks:
            for state in self._states:
                for parameter in state.sum.parameters:
                    parameter.grad = None
            for group in self.groups.values():
                if group.sockets is not None:
                    group.exchange(b"x")
            for members, group in sorted({s.group.ranks: s.group for s, report in pairs if s.failed(report)}.items()):
                given = group.gather_objects(self._failure or "")
                reasons |= {rank: why for rank, why in zip(members, given, strict=True) if why}

        # Gradients that no bucket could reduce (missing on some ranks, late, sparse) are reduced now that all ranks know of them.
        for state, report in pairs if not failed_ranks else ():
            if not state.remarkable and all(notes == report[0] for notes in report):
                for bucket in state.buckets:
                    bucket.absent = frozenset()
                continue
            for position, ranks in finish_uneven(state, report, factor / state.sum.divisor).items():
                if (id(state), position) not in self._reported:
                    self._reported.add((id(state), position))
                    self._log(explain(state.sum, position, ranks, self._step))

        # The result of a sharded sum is in the shards; `.grad` is None, unless the option asks for the full sum on all ranks.
        for bucket in self.buckets:
            if bucket.shard is not None:
                bucket.shard.landed = False
                for parameter in bucket.parameters:
                    parameter.grad = None
        for state in self._states if not failed_ranks else ():
            if state.sum.sharding is not None and state.sum.sharding.give_back:
                give_back(state.group, state.buckets)

        # The bucket layout follows parameters that were frozen or unfrozen, and sparse gradients; after the first step buckets
        # start in the order in which gradients arrived. Collective if something changed, which the notes of all ranks tell.
        if not failed_ranks:
            changed = [state for state, report in pairs if state.adapt(report)]
            recorded = [state for state in self._states if state.recording]
            for state in self._states:
                if state in changed:
                    state.recording = True
                    state.lay_out()
                elif state in recorded:
                    state.learn_order()
            if changed or recorded:
                self._arrange()
                self.generation += bool(changed)

        self._step += 1
        self._scale_of = self._failure = None
        self._last = self._pass_open = False
        return StepOutcome(scale, failed_ranks, reasons, drop_flag, numbers)

    def close(self) -> None:
        """Remove the hooks and close the connections. Gradients stay valid; the synchroniser cannot be used any more."""
        self._remove_hooks()
        for group in self.groups.values():
            group.close()

    # -- the hook on parameters -----------------------------------------------------------------------------

    @torch.no_grad()
    def _on_gradient(self, at: int, index: int) -> None:
        """Autograd has accumulated the gradient of parameter `index` of bucket `at`."""
        # A further backward pass writes to gradients, too, so writes no longer mean that the training loop changed them.
        bucket, self._ended = self.buckets[at], []
        state = self._state_of[id(bucket)]
        self.unprepared_gradients |= not (self._pass_open or state.group.alone)

        # In the first step each parameter has a hook, and the order of arrival is recorded.
        if bucket.recording:
            state.record(bucket.positions[index])
            if bucket.keeps_gradients:
                bucket.move([index])
            return

        # From then on only the parameter whose gradient arrives last has one: a hook on each would cost more than the overlap
        # gains. A parameter that is used several times fires several times (`firings`).
        bucket.left -= 1
        if bucket.left != 0 or bucket.started or not self._pass_open:
            return
        bucket.move_arrived()
        bucket.full = bucket.is_complete() and (self._last or bucket.every_pass)
        if bucket.full:
            self._start_early(only_full=True)

    # -- starting buckets -----------------------------------------------------------------------------------

    def _start_early(self, only_full: bool = False) -> None:
        """Start buckets before `wait`, strictly in order, since all ranks must issue the same collectives in the same order."""
        for bucket in self.buckets:
            if bucket.transport.early and not bucket.started and bucket not in self._last_over_ranks:
                if only_full and not bucket.full:
                    return
                self._state_of[id(bucket)].start(bucket, early=True)

    def _start_rest(self, buckets: Sequence[Bucket]) -> None:
        """Start the buckets that were not started during backward."""
        for bucket in buckets:
            if not bucket.started:
                self._state_of[id(bucket)].start(bucket, early=False)

    @torch.no_grad()
    def _end_pass(self) -> None:
        """After a pass before the last: reduce the buckets that are reduced at every pass."""
        every_pass = [bucket for bucket in self.buckets if bucket.every_pass]
        self._start_rest(every_pass)
        for bucket in every_pass:
            bucket.started = False

    # -- between steps --------------------------------------------------------------------------------------

    def _arrange(self) -> None:
        """Order the buckets of all sums, and register hooks on the parameters."""
        self.buckets = in_starting_order(state.buckets for state in self._states)
        self._state_of = {id(bucket): state for state in self._states for bucket in state.buckets}
        self._last_over_ranks = last_over_ranks(self.buckets)
        world = tuple(range(dist.get_world_size())) if dist.is_initialized() else None
        to_all = [bucket for bucket in self.buckets if bucket.sum.ranks == world]
        *_, last = [None, *to_all]
        self._last_to_all = last if last is not None and last.carries else None
        self._first_to_all = next((bucket for bucket in to_all if bucket.carries_counts), None)
        # A hook must not keep the synchroniser alive: parameters outlive it, and it owns the gradient memory.
        self._remove_hooks()
        weak = weakref.ref(self)

        def hook(at: int, index: int) -> Callable[[Tensor], None]:
            def call(_: Tensor) -> None:
                synchroniser = weak()
                if synchroniser is not None:
                    synchroniser._on_gradient(at, index)

            return call

        for at, bucket in enumerate(self.buckets):
            bucket.left = bucket.firings
            for index in range(len(bucket.parameters)) if bucket.recording else (bucket.last,):
                parameter = bucket.parameters[index]
                if parameter.requires_grad:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook(at, index)))

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
