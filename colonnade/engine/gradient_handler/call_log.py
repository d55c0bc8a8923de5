"""What handlers have called, step by step: kept on every rank, so that ranks can compare it.

Handlers that say what they sum cannot call anything else. Of those that sum by hand, every collective is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colonnade.comm.messages import digest_of
from colonnade.comm.torch_versions import noting_collectives
from colonnade.engine.gradient_handler.base import BaseGradientHandler, PlannedGradientHandler
from colonnade.parallel.dtensor import local_part

Entry = tuple[str, str, tuple[int, ...]]
"""(handler, what it calls, over which ranks); no ranks: it does what it has planned."""
Steps = list[tuple[int, tuple[Entry, ...]]]
"""(number of a step, what was called in it), where nothing was left out."""

_BITS = (1 << 62) - 1
_PLANNED = "does its planned sums"


class CallLog:
    """Runs handlers and notes what they call. `at` is told of each collective before it is made."""

    def __init__(self, named: Callable[[], Iterable[tuple[str, nn.Parameter]]], at: Callable[[str], None]) -> None:
        self._named, self._at = named, at
        self._entries: list[Entry] = []
        self._known: dict[tuple[Entry, ...], tuple[tuple[Entry, ...], dict[Any, int]]] = {}
        self._names: dict[int, str] = {}
        self.steps: Steps = []
        """Since `forget`."""
        self.digests: dict[Any, int] = {}
        """What was called so far over each set of ranks, and (under None) in which order handlers ran, as a number."""

    def run(self, handler: BaseGradientHandler) -> None:
        """Let a handler do its part of a step."""
        name = type(handler).__name__
        if isinstance(handler, PlannedGradientHandler):
            self._entries.append((name, _PLANNED, ()))
            handler.handle_gradient()
            return
        self._entries.append((name, "begins", ()))
        self._names = {}
        with noting_collectives(partial(self._note, name)):
            handler.handle_gradient()
        self._at("summing the gradients")

    def end_step(self, step: int) -> None:
        """All handlers have run, or none."""
        called, self._entries = tuple(self._entries), []
        if called not in self._known:
            self._known[called] = called, _by_ranks(called)
        called, digests = self._known[called]  # one object for all steps that are alike
        for ranks, digest in digests.items():
            self.digests[ranks] = (self.digests.get(ranks, 0) * 1_000_003 + digest) & _BITS
        self.steps.append((step, called))

    def forget(self) -> None:
        """What was called so far was alike on all ranks."""
        self.steps.clear()
        self._known.clear()

    @property
    def so_far(self) -> Steps:
        """With the step that is under way."""
        step = self.steps[-1][0] + 1 if self.steps else -1
        return [*self.steps, (step, tuple(self._entries))]

    def _note(self, handler: str, name: str, group: Any, given: Any) -> None:
        """A handler is about to make this collective."""
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) == 1:
            return
        if not self._names:
            gradients = ((name, p.grad) for name, p in self._named() if p.grad is not None)
            self._names = {local_part(grad).data_ptr(): name for name, grad in gradients if not grad.is_sparse}
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        found = next((self._names[t.data_ptr()] for t in tensors if t.data_ptr() in self._names), None)
        what = f"of {found!r}" if found is not None else f"of {sum(t.numel() for t in tensors)} elements"
        self._entries.append((handler, f"{name} {what}", ranks))
        self._at(f"in {handler}, at {name} {what} over ranks {list(ranks)}")


def _by_ranks(called: Sequence[Entry]) -> dict[Any, int]:
    found: dict[Any, list[Entry]] = {None: [entry for entry in called if not entry[2]]}
    for entry in called:
        if entry[2]:
            found.setdefault(entry[2], []).append(entry)
    return {ranks: digest_of(repr(entries)) for ranks, entries in found.items()}


def first_difference(
    one: Steps, other: Steps, ranks: Sequence[int] | None, under_way: bool = False
) -> tuple[int, str, str] | None:
    """(step, what was called on the first, what on the other) where two ranks first differ in calls over `ranks`.

    `ranks` None: in the order of handlers. `under_way`: the other may still make further calls of its last step.
    """
    for at_step, ((step, mine), (_, theirs)) in enumerate(zip(one, other, strict=False)):
        left, right = ([e for e in called if e[2] == tuple(ranks or ())] for called in (mine, theirs))
        open_end = under_way and at_step == len(other) - 1
        for at in range(len(right) if open_end else max(len(left), len(right))):
            pair = [each[at] if at < len(each) else None for each in (left, right)]
            if pair[0] != pair[1]:
                return step, _said(pair[0], at), _said(pair[1], at)
    return None


def read_steps(told: Any) -> Steps:
    """Steps that came as JSON."""
    return [(step, tuple((who, what, tuple(ranks)) for who, what, ranks in called)) for step, called in told]


def _said(entry: Entry | None, at: int) -> str:
    if entry is None:
        return f"makes no further call after {at}"
    who, what, _ = entry
    return f"{who} {what}" if what in ("begins", _PLANNED) else f"{who} calls {what}"
