"""Gradient synchronisation: gradients are summed over groups of ranks, while backward runs where that pays.

The reducer owns flat buckets, moves gradients into them as backward makes them, starts a bucket as soon as it is
full on the last micro-batch, and finishes the rest in `wait`. Correctness never rests on when a gradient comes:
a bucket that was started too early leaves a late gradient beside it, which `wait` finds and adds on all ranks.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.engine.gradient_handler._agreement import OUTSIDE, Agreement
from colonnade.engine.gradient_handler._bucket import Bucket
from colonnade.engine.gradient_handler._lane import Log, keep_heap
from colonnade.engine.gradient_handler._options import GroupReduction, PowerSGD, SyncOptions
from colonnade.engine.gradient_handler._party import Party
from colonnade.engine.gradient_handler._reduction_state import ReductionState
from colonnade.engine.gradient_handler._settle import settle
from colonnade.engine.gradient_handler._start_up import check_alike, parties_of
from colonnade.errors import listed

__all__ = ["BucketPlan", "GradientReducer", "GroupReduction", "PowerSGD", "SyncOptions"]

_log: Log = logging.getLogger("colonnade").info


@dataclass(frozen=True)
class BucketPlan:
    """One bucket as data: which parameters travel together, how many elements, between whom and how."""

    index: int
    names: tuple[str, ...]
    numel: int
    ranks: tuple[int, ...]
    dtype: str
    transport: str
    divisor: float

    def __str__(self) -> str:
        shown = ", ".join(self.names[:3]) + (f", ... ({len(self.names)})" if len(self.names) > 3 else "")
        return (
            f"bucket {self.index}: {self.numel} x {self.dtype} over ranks {list(self.ranks)} / {self.divisor:g} "
            f"by {self.transport}: {shown}"
        )


class GradientReducer:
    """Reduces the gradients of a model as its `reductions` say; one per set of options.

    Call `prepare(last)` before each backward and `wait()` before gradients are used; both on every rank, and
    `wait` the same number of times. After `wait`, `.grad` is final and, unless sparse or None, a view of
    a bucket. `scale`, when set before `wait`, is a further factor on that step's gradients. `buckets` changes after
    the first step, when the order of gradients is known, and when parameters are frozen or thawed; `generation`
    counts these changes.
    """

    def __init__(
        self,
        reductions: Sequence[GroupReduction],
        options: SyncOptions | None = None,
        *,
        log: Log = _log,
    ) -> None:
        self.scale: float | Tensor | None = None
        self.generation = 0
        self.buckets: list[Bucket] = []
        self._options = options or SyncOptions()
        self._log = log
        # In one order on every rank, since each has its own subset of reductions and some of this is collective.
        reductions = sorted(reductions, key=lambda reduction: reduction.ranks)
        parties = parties_of(reductions, self._options, log)
        check_alike(reductions, parties, self._options)
        self._states = [ReductionState(r, parties[r.ranks], self._options, log) for r in reductions]
        self._agreements = [self._agreement(party) for _, party in sorted(parties.items())]
        self._owner = {id(state.reduction): state for state in self._states}
        self._handles: list[Any] = []
        self._last = False
        self._step = 0
        self._reported: set[tuple[int, int]] = set()
        self._switch()
        keep_heap()

    def prepare(self, last: bool) -> None:
        """Before a backward pass: is it the last one of this step?"""
        self._switch()
        self._last = last
        for state in self._states:
            state.begin_pass()
        for bucket in self.buckets:
            if not bucket.started:
                bucket.begin()

    @torch.no_grad()
    def zero_grad(self) -> None:
        """Forget the gradients, like `optimizer.zero_grad()` but with one write per bucket.

        Until `wait`, `.grad` of a small parameter is then zeros where the optimizer's would be None.
        """
        if any(state.must_switch for state in self._states):
            # Before the change, or it would carry the old gradients along.
            for bucket in self.buckets:
                bucket.forget()
            self._switch()
        for bucket in self.buckets:
            bucket.zero()
        for state in self._states:
            state.zero_outside()

    @torch.no_grad()
    def wait(self) -> None:
        """Reduce what is not yet reduced and wait for all of it. Collective; `.grad` is final afterwards."""
        self._switch()
        self._start_rest()
        for agreement, states in self._agreements:
            agreement.announce(self._step, [bytes(state.notes) for state in states])
        self._finish_buckets()
        reports = [report for agreement, _ in self._agreements for report in agreement.resolve()]
        for state, report in zip(self._states, reports, strict=True):
            self._settle(state, report)
        if self._options.callback is not None:
            for bucket in self.buckets:
                self._options.callback(bucket.buffer, bucket.names)
        for state, report in zip(self._states, reports, strict=True):
            state.plan_ahead(report)
        self._step, self._last, self.scale = self._step + 1, False, None

    @property
    def order(self) -> list[str]:
        """The names of the parameters in the order that their buckets follow."""
        return [name for state in self._states for name in state.order]

    def follow(self, names: Sequence[str]) -> None:
        """Lay the buckets out in an order of an earlier run, so that sums are taken in its order. Collective."""
        for state in self._states:
            state.follow(names)

    def plan(self) -> list[BucketPlan]:
        """The buckets as printable data, in the order in which they are reduced."""
        return [
            BucketPlan(
                index,
                bucket.names,
                bucket.layout.numel,
                bucket.reduction.ranks,
                str(bucket.layout.dtype).removeprefix("torch."),
                self._owner[id(bucket.reduction)].transport_of(bucket),
                bucket.reduction.divisor,
            )
            for index, bucket in enumerate(self.buckets)
        ]

    def close(self) -> None:
        """Remove the hooks and the connections. Gradients stay valid; the reducer does not."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for agreement, _ in self._agreements:
            agreement.party.close()

    # During backward

    def _on_gradient(self, at: int, index: int) -> None:
        """While recording: note the order of gradients and move each at once."""
        bucket = self.buckets[at]
        self._owner[id(bucket.reduction)].record(bucket.positions[index])
        with torch.no_grad():
            bucket.move([index])

    def _on_large(self, at: int, index: int) -> None:
        """A gradient that is moved by itself has come."""
        bucket = self.buckets[at]
        if not bucket.started:
            with torch.no_grad():
                bucket.move_large(index, self._last)

    def _on_sentinel(self, at: int, _: int) -> None:
        """The gradient that comes last in a bucket has come."""
        bucket = self.buckets[at]
        bucket.left -= 1
        if bucket.left != 0 or bucket.started:
            return
        with torch.no_grad():
            bucket.full = bucket.fill_up() and self._last
            if bucket.full:
                self._start_full()

    def _start_full(self) -> None:
        """Start full buckets, strictly in order: every rank issues the same collectives in the same order."""
        for bucket in self.buckets:
            if bucket.task.early and not bucket.started:
                if not bucket.full:
                    return
                bucket.start_early()

    # In wait

    def _start_rest(self) -> None:
        """Start all that backward has left, and write the notes about gradients that are not in their bucket."""
        for state in self._states:
            state.open_notes()
        for bucket in self.buckets:
            written = self._owner[id(bucket.reduction)].notes
            if bucket.started:
                for position, parameter in zip(bucket.positions, bucket.parameters, strict=True):
                    if parameter.grad is not None:
                        written[position] |= OUTSIDE
                continue
            for position, note in bucket.start_late().items():
                written[position] |= note

    def _finish_buckets(self) -> None:
        sharing = [agreement for agreement, _ in self._agreements if agreement.party.peers is not None]
        for agreement in sharing:
            agreement.resolve()
        for bucket in self.buckets:
            bucket.finish(self.scale)
        # A rank's buffer is final when every rank has written its slice into it.
        for agreement in sharing:
            agreement.party.signal(b"d")
        for agreement in sharing:
            agreement.party.collect()

    def _settle(self, state: ReductionState, report: list[bytes]) -> None:
        if not state.remarkable and all(notes == report[0] for notes in report):
            return
        reduction = state.reduction
        scale = 1.0 if self.scale is None else self.scale
        uneven = settle(state, report, scale / reduction.divisor, self._options)
        for position, ranks in uneven.items():
            if (id(reduction), position) not in self._reported:
                self._reported.add((id(reduction), position))
                self._log(
                    f"step {self._step}: no gradient for {reduction.names[position]!r} on ranks {listed(ranks)}, "
                    f"but on others of {listed(reduction.ranks)}: counted as zero (said once)"
                )

    # Between steps

    @torch.no_grad()
    def _switch(self) -> None:
        """Take new buckets into use where some have been laid out."""
        if not any(state.must_switch for state in self._states):
            return
        ranked = []
        for serial, state in enumerate(self._states):
            state.switch()
            for fraction, bucket in state.ranked:
                ranked.append((fraction, state.reduction.ranks, serial, str(bucket.layout.dtype), bucket))
        # By how far through its lane a bucket is: a key that all ranks of two groups agree on.
        self.buckets = [bucket for *_, bucket in sorted(ranked, key=lambda entry: entry[:4])]
        self.generation += 1
        self._install_hooks()

    def _install_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for at, bucket in enumerate(self.buckets):
            if bucket.recording:
                for index, parameter in enumerate(bucket.parameters):
                    self._hook(parameter, self._on_gradient, at, index)
                continue
            for position in bucket.large:
                index = bucket.positions.index(position)
                self._hook(bucket.parameters[index], self._on_large, at, index)
            last, bucket.firings = self._owner[id(bucket.reduction)].last_to_come(bucket)
            bucket.left = bucket.firings
            self._hook(bucket.parameters[last], self._on_sentinel, at, last)

    def _hook(self, parameter: nn.Parameter, method: Callable[[int, int], None], at: int, index: int) -> None:
        if not parameter.requires_grad:
            return
        # Not a reference to this object: a reducer that nobody holds any more must be able to go.
        weak = weakref.WeakMethod(method)

        def call(_: Tensor) -> None:
            alive = weak()
            if alive is not None:
                alive(at, index)

        self._handles.append(parameter.register_post_accumulate_grad_hook(call))

    def _agreement(self, party: Party) -> tuple[Agreement, list[ReductionState]]:
        states = [state for state in self._states if state.party is party]
        return Agreement(party, [len(state.reduction.parameters) for state in states]), states
