"""The synchroniser: gradients are summed over groups of ranks, while backward runs where that pays.

It owns flat buckets, moves gradients into them as backward makes them, starts a bucket as soon as it is full on the
last micro-batch, and finishes the rest in `wait`. Correctness never rests on when a gradient comes: a bucket that was
started too early leaves a late gradient beside it, which `wait` finds and adds on all ranks.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.comm.rank_group import RankGroup, keep_heap
from colonnade.errors import GradientError
from colonnade.gradients.bucket import FAILED, OUTSIDE, SPARSE, Bucket
from colonnade.gradients.gather import give_back
from colonnade.gradients.sums import Sum
from colonnade.gradients.uneven import GroupNotes, PiggybackedFlags, SumState, explain, finish_uneven, notes_of_all
from colonnade.parallel.dtensor import local_part
from colonnade.texts import digest_of

# --------------------------------------------------------------------------------------------------
# Before the first step: the groups that sums go over, and a check that all their ranks have the same sums.
# --------------------------------------------------------------------------------------------------


Log = Callable[[str], None]


def open_groups(sums: Sequence[Sum], log: Log) -> dict[tuple[int, ...], RankGroup]:
    """One per set of ranks, connected where shared memory is wanted. Collective, in the order of ranks.

    What is wrong in one group is raised when the others were gone through, where ranks that know of no problem take part.
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
    """(name, what must be the same on all ranks) for a sum and each of its parameters."""
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


class Synchroniser:
    """Carries out the `sums` of a model; one for all of them, so that a group's collectives have one order.

    Call `prepare(last)` before each backward and `wait()` before gradients are used; both on every rank, and
    `wait` the same number of times. After `wait`, `.grad` is final and, unless sparse or None, a view of
    a bucket; of a sharded sum the buckets' shards are final, and `.grad` is None. `scale`, when set before `wait`, is a
    further factor on that step's gradients; `carry` has it made of numbers of all ranks. `generation` counts how often
    buckets were laid out: anew when parameters are frozen or thawed, or turn out to have sparse gradients.
    """

    def __init__(self, sums: Sequence[Sum], *, log: Log = _log) -> None:
        self.scale: float | Tensor | None = None
        self.last_scale: float | Tensor | None = None  # that of the last step
        self._scale_of: Callable[[Tensor], Tensor] | None = None
        self.generation = 0
        self.buckets: list[Bucket] = []
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
        self._last_of: dict[tuple[int, ...], Bucket] = {}
        # On which numbers can ride: those that go to the whole world as they are.
        self._first_to_all: Bucket | None = None
        self._last_to_all: Bucket | None = None
        self._handles: list[Any] = []
        self._last = self._pass_open = self._failed = False
        self.unprepared_gradients = False
        """Gradients have come from a backward pass that was not prepared for: nobody sums them."""
        self.failed_ranks: list[int] = []
        """The ranks that gave the last step up, so that its gradients are worth nothing."""
        self.failure_reasons: dict[int, str] = {}
        """Of those of them that told why: what they told."""
        self._why = ""
        self.counts = False
        """Set before `wait` by a rank whose loss of this step is (sum, count): all ranks of a sum must have the same form."""
        self.flags: PiggybackedFlags | None = None
        """Set by whoever can drop a step on the device and makes a collective over the world at every step."""
        self.unsent_flags: Tensor | None = None
        """What the flags of this rank have to tell the world about the last step."""
        self.drop_flag: Tensor | None = None
        """What the world has said of it already: 1.0 if the step must be dropped."""
        self._seen: list[tuple[bytes, list[bytes]]] = []
        self._counted = False  # whether losses were (sum, count) in the last step in which the ranks agreed
        self._ended: list[tuple[Bucket, list[tuple[Tensor | None, int | None]]]] = []
        self._step = 0
        self._reported: set[tuple[int, int]] = set()
        self._arrange()
        keep_heap()

    @property
    def layout(self) -> list[Bucket]:
        """All buckets in the order in which they lie in memory; `buckets` has them in the order in which they start."""
        return [bucket for state in self._states for bucket in state.laid_out]

    def prepare(self, last: bool) -> None:
        """Before a backward pass: is it the last one of this step?"""
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
    def end_backward(self) -> None:
        """A backward pass has ended: start what other ranks may have started in theirs, and may be waiting for there.

        So whatever ranks say to each other before `wait` or the next pass comes at the same place on all of them.
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
        for bucket, written in self._ended:
            for name, before, now in zip(bucket.names, written, bucket.written(), strict=True):
                (was, writes), (grad, writes_now) = before, now
                if was is not grad or writes != writes_now:
                    raise GradientError(
                        f"the gradient of {name!r} was changed between backward and step, before it was summed over the "
                        f"ranks. To clip, set clip_grad_norm in the config (not torch.nn.utils.clip_grad_norm_); anything else "
                        f"is for a gradient handler",
                        code="C046",
                    )
        self._ended = []

    @torch.no_grad()
    def carry(self, numbers: Tensor, scale_of: Callable[[Tensor], Tensor]) -> bool:
        """Between `prepare` and the last pass of a step: have two numbers summed over the world with the first bucket, and
        the `scale` of the step made of their sums. False, on all ranks alike, if no bucket can carry them."""
        if self._first_to_all is not None:
            self._first_to_all.tail[-len(numbers) :].copy_(numbers)
            self._scale_of = scale_of
        return self._first_to_all is not None

    def fail(self, why: str = "") -> None:
        """Backward has failed on this rank: at the next `wait` all ranks learn of it, of `why`, and drop their gradients."""
        self._failed, self._why = True, why
        self._last = self._pass_open = True

    def finish(self) -> None:
        """`wait`, unless that has been done since the last `prepare`: several handlers may ask for it."""
        if self._pass_open:
            self.wait()

    @torch.no_grad()
    def wait(self) -> None:
        """Sum what is not yet summed and wait for all of it. Collective; gradients are final afterwards."""
        for state in self._states:
            state.open_notes(self._failed)
        self._start_early()
        carrier = self._last_to_all if self.flags is not None else None
        self._start_rest([bucket for bucket in self.buckets if bucket is not carrier])
        if carrier is not None:
            self._state_of[id(carrier)].collect(carrier, early=False)
        for state in self._states:
            state.finish_staged()
        pairs = self._compare_notes(carrier)
        self.failed_ranks = sorted({rank for state, report in pairs for rank in state.failed(report)})
        self.failure_reasons = {}
        if self.failed_ranks:
            self._drop()
            self._gather_reasons(pairs)
        else:
            for state, report in pairs:
                self._finish_uneven(state, report)
            self._hand_over()
            self._learn(pairs)
        self._step, self.last_scale, self.scale, self._scale_of = self._step + 1, self.scale, None, None
        self._last = self._pass_open = self._failed = self.counts = False
        self._why = ""

    def close(self) -> None:
        """Remove the hooks and the connections. Gradients stay valid; the synchroniser does not."""
        self._remove_hooks()
        for group in self.groups.values():
            group.close()

    # During backward

    def _gradient_arrived(self, at: int) -> Bucket:
        """The bucket that a gradient has come to."""
        bucket, self._ended = self.buckets[at], []
        self.unprepared_gradients = self.unprepared_gradients or not (
            self._pass_open or self._state_of[id(bucket)].group.alone
        )
        return bucket

    def _on_gradient(self, at: int, index: int) -> None:
        """While recording: note the order of gradients and move each at once."""
        bucket = self._gradient_arrived(at)
        self._state_of[id(bucket)].record(bucket.positions[index])
        if bucket.keeps_gradients:
            with torch.no_grad():
                bucket.move([index])

    def _on_large(self, at: int, index: int) -> None:
        """A gradient that is moved by itself has come."""
        bucket = self._gradient_arrived(at)
        if not bucket.started:
            with torch.no_grad():
                bucket.move_large(index, self._last)

    def _on_last(self, at: int, _: int) -> None:
        """The gradient that comes last in a bucket has come."""
        bucket = self._gradient_arrived(at)
        bucket.left -= 1
        if bucket.left != 0 or bucket.started or not self._pass_open:
            return
        with torch.no_grad():
            bucket.full = bucket.is_complete() and (self._last or bucket.every_pass)
            if bucket.full:
                self._start_early(only_full=True)

    def _start_early(self, only_full: bool = False) -> None:
        """Start buckets before `wait`, strictly in order: every rank issues the same collectives in the same order.

        The last one of each group waits for `wait`: nothing is won by sending it a moment sooner, and as long as it is
        here gradients that somebody changes by hand can be noticed.
        """
        for bucket in self.buckets:
            if bucket.transport.early and not bucket.started and bucket not in self._last_of.values():
                if only_full and not bucket.full:
                    return
                self._state_of[id(bucket)].start(bucket, early=True)

    @torch.no_grad()
    def _end_pass(self) -> None:
        """Buckets that are summed at every pass: those of the pass before, all of them."""
        mine = [bucket for bucket in self.buckets if bucket.every_pass]
        self._start_rest(mine)
        for bucket in mine:
            bucket.started = False

    @property
    def host_waits(self) -> bool:
        """Whether the host waits for sums over ranks as they are: then agreeing with them costs no further wait."""
        return any(bucket.transport.host_waits for bucket in self.buckets)

    # In wait

    def _start_rest(self, buckets: Sequence[Bucket]) -> None:
        """Start all that backward has left."""
        for bucket in buckets:
            if not bucket.started:
                self._state_of[id(bucket)].start(bucket, early=False)

    def _finish_buckets(self) -> None:
        if self._scale_of is not None and self._first_to_all is not None:
            self._first_to_all.transport.wait()
            carried = self._first_to_all.tail[-2:]
            self.scale = self._scale_of(carried.double())
            carried.zero_()
        sharing = [notes for notes in self._group_notes if notes.group.sockets is not None]
        for notes in sharing:
            notes.resolve()  # from here on all ranks' gradients are in their memory
        for bucket in self.buckets:
            if bucket.keeps_gradients:
                bucket.finish(1.0 if self.scale is None else self.scale)
            elif self.scale is not None:
                bucket.rescale(self.scale)
        # A rank's memory is final when every rank has written its slice into it.
        written = [a.group for a in sharing if any(state.sum.sharding is None for state in a.states)]
        for group in written:
            group.signal(b"d")
        for group in written:
            group.collect()

    def _compare_notes(self, carrier: Bucket | None) -> list[tuple[SumState, list[bytes]]]:
        """Finish the buckets, and have all ranks' notes about each sum: from them, or in a steady step as they were."""
        if self.flags is not None:
            said = self.flags.begin()
            if said is not None:
                self._log(said)
        states = [state for notes in self._group_notes for state in notes.states]
        if self.flags is not None and self.flags.steady:
            notes = [state.close_notes() for state in states]
            deviates = self._failed or self.counts != self._counted or notes != [own for own, _ in self._seen]
            self._send_flags(self.flags.numbers(deviates, unsteady=False), carrier)
            if deviates and carrier is not None and self.flags.all_deviate(carrier.tail):
                # As when all ranks freeze a layer: then all are here, and can agree after all.
                self.drop_flag = None
                return notes_of_all(self._group_notes, self._step, counts=self.counts)
            return [(state, report) for state, (_, report) in zip(states, self._seen, strict=True)]
        if self.flags is not None:
            pairs = notes_of_all(self._group_notes, self._step, counts=self.counts)
            seen = [(bytes(state.notes), report) for state, report in pairs]
            odd = any(note & (OUTSIDE | SPARSE | FAILED) for _, report in seen for notes in report for note in notes)
            learns = any(state.recording for state in states) or self.counts != self._counted
            self._counted = self.counts
            self._send_flags(self.flags.numbers(False, unsteady=odd or learns or seen != self._seen), carrier)
            self._seen = seen
            return pairs
        return notes_of_all(self._group_notes, self._step, meanwhile=self._finish_buckets, counts=self.counts)

    def _send_flags(self, told: Tensor, carrier: Bucket | None) -> None:
        """Send the flags' numbers with the last bucket if it can carry them; else they go with the next collective."""
        assert self.flags is not None
        self.unsent_flags, self.drop_flag = told, None
        if carrier is not None:
            carrier.tail[: len(told)].copy_(told)
            carrier.send()
        self._finish_buckets()
        if carrier is not None:
            self.unsent_flags, self.drop_flag = None, self.flags.take(carrier.tail[: len(told)].double())

    def _finish_uneven(self, state: SumState, report: list[bytes]) -> None:
        if not state.remarkable and all(notes == report[0] for notes in report):
            for bucket in state.buckets:
                bucket.absent = frozenset()
            return
        scale = 1.0 if self.scale is None else self.scale
        for position, ranks in finish_uneven(state, report, scale / state.sum.divisor).items():
            if (id(state), position) not in self._reported:
                self._reported.add((id(state), position))
                self._log(explain(state.sum, position, ranks, self._step))

    def _hand_over(self) -> None:
        """Of sharded sums, the shards are the result; `.grad` is None, or what all ranks are to have back."""
        for bucket in self.buckets:
            bucket.started = False
            if bucket.shard is not None:
                bucket.shard.landed = False
                for parameter in bucket.parameters:
                    parameter.grad = None
        for state in self._states:
            if state.sum.sharding is not None and state.sum.sharding.give_back:
                give_back(state.group, state.buckets)

    def _drop(self) -> None:
        """Let go of all gradients of a step that a rank has given up."""
        for bucket in self.buckets:
            bucket.started = False
            if bucket.shard is not None:
                bucket.shard.landed = False
        for state in self._states:
            for parameter in state.sum.parameters:
                parameter.grad = None
        for group in self.groups.values():
            if group.sockets is not None:
                group.exchange(b"x")  # no rank writes to memory that another still reads

    def _gather_reasons(self, pairs: Sequence[tuple[SumState, list[bytes]]]) -> None:
        """Collective over each group in which a rank gave the step up."""
        groups = {state.group.ranks: state.group for state, report in pairs if state.failed(report)}
        for _, group in sorted(groups.items()):
            told = group.gather_objects(self._why)
            self.failure_reasons |= {rank: why for rank, why in zip(group.ranks, told, strict=True) if why}

    def _learn(self, reports: Sequence[tuple[SumState, list[bytes]]]) -> None:
        """Adapt the buckets to what this step has shown. Collective where something is new."""
        changed = [state for state, report in reports if state.adapt(report)]
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

    # Between steps

    def _arrange(self) -> None:
        """Put the buckets of all sums into one order, and hooks on the parameters."""
        # By how far through its sum a bucket is: a key that all ranks of two groups agree on.
        ranked = {bucket: (far, state.sum.ranks) for state in self._states for far, bucket in state.ranked()}
        self.buckets = sorted(ranked, key=ranked.__getitem__)
        self._state_of = {id(bucket): state for state in self._states for bucket in state.buckets}
        self._last_of = {bucket.sum.ranks: bucket for bucket in self.buckets}
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
            for position in bucket.large:
                index = bucket.positions.index(position)
                self._hook(bucket.parameters[index], Synchroniser._on_large, at, index)
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
