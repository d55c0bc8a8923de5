"""The synchroniser: gradients are summed over groups of ranks, while backward runs where that pays.

`Synchroniser` owns flat buckets, moves gradients into them as backward makes them, and starts a bucket as soon as it is full on the
last micro-batch. Its `wait` is the end of a step, in one piece: it starts the rest, compares the notes of the ranks, ends all sums
and returns what the ranks agreed on, as a `StepOutcome`. Correctness never rests on when a gradient comes: a bucket that was started
too early leaves a late gradient beside it, which `wait` finds and adds on all ranks (`uneven.finish_uneven`). Over NCCL, in steady
state, the ranks exchange flags instead of notes, so that the host does not wait: a step with a late gradient is then dropped on
all ranks, and the following steps compare notes again (`uneven.PiggybackedFlags`).
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
from torch import Tensor, nn

from colonnade.comm.rank_group import RankGroup, keep_heap
from colonnade.errors import GradientError
from colonnade.gradients.bucket import FAILED, OUTSIDE, SPARSE, Bucket, in_starting_order, last_over_ranks
from colonnade.gradients.gather import give_back
from colonnade.gradients.sums import Sum
from colonnade.gradients.uneven import GroupNotes, PiggybackedFlags, SumState, explain, finish_uneven, notes_of_all
from colonnade.parallel.dtensor import local_part
from colonnade.texts import digest_of

# --- Before the first step: groups of ranks, and a check that all have the same sums ---


Log = Callable[[str], None]


def open_groups(sums: Sequence[Sum], log: Log) -> dict[tuple[int, ...], RankGroup]:
    """One group per set of ranks, connected where shared memory is wanted. Collective, in the order of ranks.

    An error in one group is raised after all groups: ranks that have no error still take part in the others.
    """
    _check_parameters(sums)
    groups, problems = {}, []
    for ranks in sorted({one.ranks for one in sums}):
        mine = [one for one in sums if one.ranks == ranks]
        groups[ranks] = group = RankGroup(ranks, mine[0].group, log)
        on_cpu = any(parameter.device.type == "cpu" for one in mine for parameter in one.parameters)
        sharing = [one.options for one in mine if one.options.shared_memory is not False]
        if group.alone or not on_cpu or not sharing:
            continue
        try:
            group.share_memory(must=any(options.shared_memory is True for options in sharing))
        except GradientError as error:
            problems.append(error)
        narrow = [options.narrow for options in sharing if options.narrow is not None]
        if group.sockets is not None and narrow:
            log(
                f"{narrow[0]} is not used in shared memory, where nothing is sent: gradients are summed in their own dtype"
            )
    if problems:
        for group in groups.values():
            group.close()
        raise problems[0]
    return groups


def check_alike(sums: Sequence[Sum], groups: Mapping[tuple[int, ...], RankGroup]) -> None:
    """Raise on every rank when the ranks of a group have other parameters or options. Collective."""
    problems = []
    for ranks, group in sorted(groups.items()):
        table = [line for one in sums if one.ranks == ranks for line in _described(one)]
        if len(set(group.gather_objects(digest_of(json.dumps([text for _, text in table]))))) > 1:
            problems.append(_difference(group, group.gather_objects(table)))
    if problems:
        raise GradientError(problems[0])


def _check_parameters(sums: Sequence[Sum]) -> None:
    names: dict[int, str] = {}
    for one in sums:
        for name, parameter in zip(one.names, one.parameters, strict=True):
            if id(parameter) in names:
                raise GradientError(
                    f"{name!r} is in two sums (as {names[id(parameter)]!r} before); join them into one over all their ranks"
                )
            names[id(parameter)] = name
        if not one.divisor > 0:
            raise GradientError(f"a divisor is more than 0, not {one.divisor!r}")


def _described(one: Sum) -> list[tuple[str, str]]:
    """(name, properties that must be the same on all ranks) for a sum and each of its parameters."""
    options = ", ".join(f"{field.name}={getattr(one.options, field.name)}" for field in fields(one.options))
    sharding = "" if one.sharding is None else f", {one.sharding}"
    lines = [("options", f"{options}{sharding}"), ("divisor", f"{one.divisor:g}")]
    labels = one.labels or ("",) * len(one.names)
    for name, parameter, label in zip(one.names, one.parameters, labels, strict=True):
        part = local_part(parameter)
        lines.append((name, f"{tuple(part.shape)} {part.dtype} {part.device.type}{label}"))
    return lines


def _difference(group: RankGroup, tables: list[list[list[Any]]]) -> str:
    """Name the first entry that differs, and the ranks that differ."""
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
                f"the first that only one has is {extra!r}"
            )
    return "ranks differ in what they would sum"


_log: Log = logging.getLogger("colonnade").info


@dataclass(frozen=True)
class StepOutcome:
    """The result of the sums of one step, the same on every rank of a sum."""

    scale: float | Tensor | None = None
    """The factor that the gradients were multiplied by, beside their divisors; None: 1."""
    failed_ranks: Sequence[int] = ()
    """The ranks that gave the step up: all gradients are None then."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """The failed ranks that gave a reason, with their reasons."""
    drop_flag: Tensor | None = None
    """1.0 on the device if the world drops the step; None where the flags were not sent with a bucket."""
    unsent_flags: Tensor | None = None
    """Piggybacked flags of this rank that no bucket could carry: the caller sums them over the world with the norm."""


class Synchroniser:
    """Carries out the `sums` of a model; one for all of them, so that a group's collectives have one order.

    Call `prepare(last)` before each backward pass, `end_backward()` after it and `wait()` before gradients are used: on every
    rank, and the same number of times. After `wait`, `.grad` is final and, unless sparse or None, a view of a bucket; of a
    sharded sum the buckets' shards are final, and `.grad` is None. `generation` counts how often buckets were laid out: anew
    when parameters are frozen or thawed, or turn out to have sparse gradients.
    """

    def __init__(self, sums: Sequence[Sum], *, log: Log = _log) -> None:
        self.generation = 0
        self.buckets: list[Bucket] = []
        self.unprepared_gradients = False
        """Gradients have come from a backward pass that was not prepared for: nobody sums them."""
        self._log = log
        # In one order on every rank, since each has its own subset of sums and some of this is collective.
        sums = sorted(sums, key=lambda one: one.order)
        self.groups = open_groups(sums, log)
        check_alike(sums, self.groups)
        self.parameters = {id(parameter) for one in sums for parameter in one.parameters}
        self._states = [SumState(one, self.groups[one.ranks]) for one in sums]
        self._group_notes = [
            GroupNotes(group, [state for state in self._states if state.group is group])
            for _, group in sorted(self.groups.items())
        ]
        self._state_of: dict[int, SumState] = {}
        self._last_over_ranks: list[Bucket] = []
        # The buckets that numbers can be sent with: only those that go to the whole world, as they are.
        self._first_to_all: Bucket | None = None
        self._last_to_all: Bucket | None = None
        self._handles: list[Any] = []
        self._last = self._pass_open = False
        self._scale_of: Callable[[Tensor], Tensor] | None = None
        self._failure: str | None = None  # why this rank gives the step up, "" without a reason
        self._flags: PiggybackedFlags | None = None
        # The last notes that all ranks agreed on, (own notes, notes of every rank) per sum, and the form of the losses.
        self._agreed: list[tuple[bytes, list[bytes]]] = []
        self._counted = False
        # (bucket, its gradients and how often each was written to) at the end of backward.
        self._ended: list[tuple[Bucket, list[tuple[Tensor | None, int | None]]]] = []
        self._step = 0
        self._reported: set[tuple[int, int]] = set()
        self._arrange()
        keep_heap()

    @property
    def layout(self) -> list[Bucket]:
        """All buckets in the order in which they lie in memory; `buckets` has them in the order in which they start."""
        return [bucket for state in self._states for bucket in state.laid_out]

    @property
    def host_waits(self) -> bool:
        """Whether the host waits for sums over ranks as they are: then agreeing with them costs no further wait."""
        return any(bucket.transport.host_waits for bucket in self.buckets)

    def agree_by(self, flags: PiggybackedFlags) -> None:
        """Send flags with sums in place of agreements that the host waits for; who sets this drops steps on the device."""
        self._flags = flags

    # -- before and during backward -------------------------------------------------------------------------

    def prepare(self, last: bool) -> None:
        """Before a backward pass; `last`: of its step."""
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
        """Between `prepare` and the last pass of a step: sum two numbers over the world with the first bucket; `wait` then
        multiplies by `scale_of` of their sums. False, on all ranks alike, if no bucket can carry them."""
        if self._first_to_all is not None:
            self._first_to_all.tail[-len(numbers) :].copy_(numbers)
            self._scale_of = scale_of
        return self._first_to_all is not None

    @torch.no_grad()
    def end_backward(self) -> None:
        """A backward pass has ended: start the buckets that other ranks may have started in theirs, and may wait for there.

        So messages between ranks before `wait` or the next pass come at the same place on all of them.
        After the last pass of a step, nobody may change gradients until `wait`.
        """
        if not self._last:
            if self._pass_open:  # not where a step is given up between two passes
                self._end_pass()
            self._pass_open = False
            return
        self._start_early()
        self._ended = [(bucket, bucket.written()) for bucket in self.buckets if not bucket.started]

    def check_untouched(self) -> None:
        """Refuse gradients that were written to since backward: those of other buckets are on their way already.

        Asked before the first handler runs: from then on a handler may write to those that are its own.
        """
        ended, self._ended = self._ended, []
        for bucket, written in ended:
            for name, before, now in zip(bucket.names, written, bucket.written(), strict=True):
                (was, writes), (grad, writes_now) = before, now
                if was is not grad or writes != writes_now:
                    raise GradientError(
                        f"the gradient of {name!r} was changed between backward and step, before it was summed over the "
                        f"ranks. To clip, set clip_grad_norm in the config (not torch.nn.utils.clip_grad_norm_); anything else "
                        f"is for a gradient handler",
                        code="C046",
                    )

    def fail(self, why: str = "") -> None:
        """Backward has failed on this rank: at the next `wait` all ranks learn of it, of `why`, and drop their gradients."""
        self._failure = why
        self._last = self._pass_open = True

    # -- the end of a step ----------------------------------------------------------------------------------

    @torch.no_grad()
    def wait(self, scale: float | Tensor | None = None, *, counts: bool = False) -> StepOutcome:
        """Sum the gradients that are not yet summed and wait for all of them. Collective; gradients are final afterwards.

        `scale`: a further factor on the gradients of this step, unless `carry` has it made of numbers of all ranks. `counts`:
        this rank's loss was given as (sum, count); all ranks of a sum must have the same form.
        """
        # Gradients beside the buckets are noted before the rest of the buckets is collected: of a bucket that was sent in
        # backward, a gradient in `.grad` now came too late for it.
        failed, flags = self._failure is not None, self._flags
        for state in self._states:
            state.open_notes(failed)

        # All buckets that backward has left start now, in the one order of all ranks. Where flags are sent with the last
        # bucket, it is collected and held back: the flags depend on the notes, which are complete only when every bucket is.
        self._start_early()
        carrier = self._last_to_all if flags is not None else None
        self._start_rest([bucket for bucket in self.buckets if bucket is not carrier])
        if carrier is not None:
            self._state_of[id(carrier)].collect(carrier, early=False)
        for state in self._states:
            state.finish_staged()

        # Ranks compare their notes. Where the host waits for the sums anyway (gloo, shared memory) a digest is sent now and
        # the answers are read after the sums. With flags (NCCL) the host must not wait: while all ranks are steady, each
        # takes it that the notes are those of the steps before, and flags a deviation, for which all drop the step.
        states = [state for notes in self._group_notes for state in notes.states]
        reports: list[list[bytes]] = []
        numbers: Tensor | None = None
        deviates = False
        if flags is None:
            for notes in self._group_notes:
                notes.announce(self._step, counts)
        else:
            said = flags.begin()
            if said is not None:
                self._log(said)
            if flags.steady:
                own = [state.close_notes() for state in states]
                deviates = failed or counts != self._counted or own != [mine for mine, _ in self._agreed]
                numbers = flags.numbers(deviates, unsteady=False)
            else:
                found = notes_of_all(self._group_notes, self._step, counts)
                agreed = [(bytes(state.notes), report) for state, report in zip(states, found, strict=True)]
                odd = any(
                    note & (OUTSIDE | SPARSE | FAILED) for _, report in agreed for each in report for note in each
                )
                learns = any(state.recording for state in self._states) or counts != self._counted
                numbers = flags.numbers(False, unsteady=odd or learns or agreed != self._agreed)
                self._agreed, self._counted = agreed, counts
            reports = [report for _, report in self._agreed]
        if carrier is not None and numbers is not None:
            carrier.tail[: len(numbers)].copy_(numbers)
            carrier.send()

        # Numbers that came with the first bucket make the factor of the step, so they are read before any bucket ends: the
        # factor goes into the pass over a bucket that divides it anyway.
        if self._scale_of is not None and self._first_to_all is not None:
            self._first_to_all.transport.wait()
            carried = self._first_to_all.tail[-2:]
            scale = self._scale_of(carried.double())
            carried.zero_()
        factor = 1.0 if scale is None else scale

        # In shared memory a rank reads the memory of the others, so it waits until each has said that its gradients are in
        # place, which is what the answers about notes say; and writes into it, so all wait until each has written.
        sharing = [notes for notes in self._group_notes if notes.group.sockets is not None]
        for notes in sharing:
            notes.resolve()
        for bucket in self.buckets:
            if bucket.keeps_gradients:
                bucket.finish(factor)
            elif scale is not None:  # its sum ended when its memory was needed, or above
                bucket.rescale(scale)
        written = [notes.group for notes in sharing if any(state.sum.sharding is None for state in notes.states)]
        for group in written:
            group.signal(b"d")
        for group in written:
            group.collect()

        # The notes of all ranks. A deviation that every rank flags at once, as when all freeze a layer, drops no step: all
        # ranks know of it, so all are here, and can agree after all.
        drop_flag: Tensor | None = None
        if flags is not None and numbers is not None and carrier is not None:
            sent, numbers = len(numbers), None
            drop_flag = flags.take(carrier.tail[:sent].double())
            if deviates and flags.all_deviate(carrier.tail):
                drop_flag, reports = None, notes_of_all(self._group_notes, self._step, counts)
        if flags is None:
            reports = [report for notes in self._group_notes for report in notes.resolve()]
        pairs = list(zip(states, reports, strict=True))

        # A rank that gave the step up has no gradients to add, so the sums are worth nothing: all ranks let go of them, learn
        # why, and go on. Only when every rank is here may shared memory be written to again.
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

        # Gradients that no bucket could sum (missing on some rank, late, sparse) are summed now that all ranks know of them.
        for state, report in pairs if not failed_ranks else ():
            if not state.remarkable and all(notes == report[0] for notes in report):
                for bucket in state.buckets:
                    bucket.absent = frozenset()
                continue
            for position, ranks in finish_uneven(state, report, factor / state.sum.divisor).items():
                if (id(state), position) not in self._reported:
                    self._reported.add((id(state), position))
                    self._log(explain(state.sum, position, ranks, self._step))

        # Of a sharded sum the shards are the result; `.grad` is None, or the whole sum where all ranks are to have it back.
        for bucket in self.buckets:
            if bucket.shard is not None:
                bucket.shard.landed = False
                for parameter in bucket.parameters:
                    parameter.grad = None
        for state in self._states if not failed_ranks else ():
            if state.sum.sharding is not None and state.sum.sharding.give_back:
                give_back(state.group, state.buckets)

        # Buckets follow what this step has shown: parameters that were frozen or thawed, sparse gradients, and after the first
        # step the order in which gradients come. Collective where something is new.
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
        """Remove the hooks and the connections. Gradients stay valid; the synchroniser does not."""
        self._remove_hooks()
        for group in self.groups.values():
            group.close()

    # -- hooks: a gradient has come -------------------------------------------------------------------------

    def _gradient_arrived(self, at: int) -> Bucket:
        """The bucket of a gradient that autograd has just accumulated."""
        # A further backward pass writes to gradients as well, so writes are no sign any more of a change by hand.
        bucket, self._ended = self.buckets[at], []
        self.unprepared_gradients |= not (self._pass_open or self._state_of[id(bucket)].group.alone)
        return bucket

    def _on_gradient(self, at: int, index: int) -> None:
        """While recording: note the order of gradients and move each at once."""
        bucket = self._gradient_arrived(at)
        self._state_of[id(bucket)].record(bucket.positions[index])
        if bucket.keeps_gradients:
            with torch.no_grad():
                bucket.move([index])

    def _on_last(self, at: int, _: int) -> None:
        """The gradient that comes last in a bucket has come."""
        bucket = self._gradient_arrived(at)
        bucket.left -= 1
        if bucket.left != 0 or bucket.started or not self._pass_open:
            return
        with torch.no_grad():
            bucket.move_arrived()
            bucket.full = bucket.is_complete() and (self._last or bucket.every_pass)
            if bucket.full:
                self._start_early(only_full=True)

    # -- starting buckets -----------------------------------------------------------------------------------

    def _start_early(self, only_full: bool = False) -> None:
        """Start buckets before `wait`, strictly in order: every rank issues the same collectives in the same order."""
        for bucket in self.buckets:
            if bucket.transport.early and not bucket.started and bucket not in self._last_over_ranks:
                if only_full and not bucket.full:
                    return
                self._state_of[id(bucket)].start(bucket, early=True)

    def _start_rest(self, buckets: Sequence[Bucket]) -> None:
        """Start all of these that backward has left."""
        for bucket in buckets:
            if not bucket.started:
                self._state_of[id(bucket)].start(bucket, early=False)

    @torch.no_grad()
    def _end_pass(self) -> None:
        """Of a pass before the last: sum the buckets that are summed at every pass."""
        mine = [bucket for bucket in self.buckets if bucket.every_pass]
        self._start_rest(mine)
        for bucket in mine:
            bucket.started = False

    # -- between steps --------------------------------------------------------------------------------------

    def _arrange(self) -> None:
        """Put the buckets of all sums into one order, and hooks on the parameters."""
        self.buckets = in_starting_order(state.buckets for state in self._states)
        self._state_of = {id(bucket): state for state in self._states for bucket in state.buckets}
        self._last_over_ranks = last_over_ranks(self.buckets)
        world = tuple(range(dist.get_world_size())) if dist.is_initialized() else None
        to_all = [bucket for bucket in self.buckets if bucket.sum.ranks == world]
        *_, last = [None, *to_all]
        self._last_to_all = last if last is not None and last.carries else None
        self._first_to_all = next((bucket for bucket in to_all if bucket.carries_counts), None)
        self._remove_hooks()
        for at, bucket in enumerate(self.buckets):
            if bucket.recording:
                for index, parameter in enumerate(bucket.parameters):
                    self._hook(parameter, Synchroniser._on_gradient, at, index)
                continue
            bucket.left = bucket.firings
            self._hook(bucket.parameters[bucket.last], Synchroniser._on_last, at, bucket.last)

    def _hook(
        self, parameter: nn.Parameter, act: Callable[[Synchroniser, int, int], None], at: int, index: int
    ) -> None:
        if not parameter.requires_grad:
            return
        # Not a reference to this object: a synchroniser that nobody holds any more must be able to go.
        weak = weakref.ref(self)

        def call(_: Tensor) -> None:
            alive = weak()
            if alive is not None:
                act(alive, at, index)

        self._handles.append(parameter.register_post_accumulate_grad_hook(call))

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
