"""Gradients of sharded buckets: summed over the team while backward runs, each slice on the rank that owns it.

Buckets start strictly in one order on all ranks. Correctness never rests on when a gradient comes: one that is late
for its bucket lies beside it until `sync`, where all ranks learn of it and sum it too.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from colonnade.optim.zero.flow import Flow
from colonnade.optim.zero.team_flows import TeamFlows


class ShardedGradients:
    """Drives all flows: `prepare` before each backward pass, `sync` when the slices' gradients must be final.

    `every_pass`: gradients go to their slices at every pass of a step, not only at its last. `returned`: after
    `sync` every rank has the whole gradients too. `flows` stand in the order in which they start.
    """

    def __init__(self, teams: Sequence[TeamFlows], flows: Sequence[Flow], *, every_pass: bool, returned: bool) -> None:
        self.scale: float | Tensor | None = None
        self._teams = list(teams)
        self._flows = list(flows)
        self._team_of = {id(flow): team for team in teams for flow in team.flows}
        self._every_pass, self._returned = every_pass, returned
        self._reducing = self._last = False
        self._handles: list[Any] = []
        self._install_hooks()

    def prepare(self, last: bool) -> None:
        """Before a backward pass: is it the last one of this step?"""
        if self._last:  # further passes of the same last one, as a schedule makes them
            return
        for team in self._teams:
            team.gather.wait()
        if self._reducing:
            self._flush()
        self._last = last
        self._reducing = last or self._every_pass
        for flow in self._flows:
            flow.begin()

    @torch.no_grad()
    def sync(self) -> None:
        """Finish all sums. Collective; afterwards the buckets' `grads` are final, and `.grad` is None."""
        self._flush()
        for team in self._teams:
            team.finish()
        for flow in self._flows:
            _multiply(flow.bucket.grads, self.scale)
            flow.end()
        if self._returned:
            for team in self._teams:
                team.give_back()
        self._reducing = self._last = False
        self.scale = None

    def forget(self) -> None:
        """Begin the step anew, without the gradients that have come so far."""
        if not self._reducing:
            for flow in self._flows:
                flow.forget()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _flush(self) -> None:
        """Start all that backward has left."""
        for flow in self._flows:
            if not flow.started:
                self._team_of[id(flow)].start(flow)

    def _on_gradient(self, at: int, index: int) -> None:
        flow = self._flows[at]
        if flow.keeps and index in flow.large:
            with torch.no_grad():
                flow.keep(index)
        if self._reducing and flow.early and flow.arrived(index):
            self._start_full()

    def _start_full(self) -> None:
        """Start full buckets, strictly in order: every rank issues the same collectives in the same order."""
        for flow in self._flows:
            if flow.early and not flow.started:
                if not flow.full:
                    return
                self._team_of[id(flow)].start(flow)

    def _install_hooks(self) -> None:
        for at, flow in enumerate(self._flows):
            for index, parameter in enumerate(flow.parameters):
                if flow.early or index in flow.large:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook(at, index)))

    def _hook(self, at: int, index: int) -> Any:
        # Not a reference to this object: gradients that nobody holds any more must be able to go.
        weak = weakref.WeakMethod(self._on_gradient)

        def call(_: Tensor) -> None:
            alive = weak()
            if alive is not None:
                alive(at, index)

        return call


def _multiply(grads: Tensor, scale: float | Tensor | None) -> None:
    if scale is not None:
        grads.mul_(scale.to(grads.device, grads.dtype) if isinstance(scale, Tensor) else scale)
