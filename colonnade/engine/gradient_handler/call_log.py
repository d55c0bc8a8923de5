"""What handlers have called, step by step: kept on every rank, so that ranks can compare it.

Handlers that say what they sum cannot call anything else. Of those that sum by hand, every collective is noted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import zip_longest
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
Steps = list[tuple[Entry, ...]]
"""What was called in each step."""

_PLANNED = "does its planned sums"


class CallLog:
    """Runs handlers and notes what they call. `at` is told of each collective before it is made."""

    def __init__(self, named: Callable[[], Iterable[tuple[str, nn.Parameter]]], at: Callable[[str], None]) -> None:
        self._named, self._at = named, at
        self._entries: list[Entry] = []
        self._known: dict[tuple[Entry, ...], tuple[tuple[Entry, ...], dict[Any, int]]] = {}
        self._names: dict[int, str] = {}
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._texts: dict[Any, tuple[Entry, str] | None] = {}
        """By what is called: what is noted of it. Made once, since a step may make hundreds of calls."""
        self.steps: Steps = []
        """Since `forget`."""
        self.digests: Counter[tuple[int, ...] | None] = Counter()
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

    def end_step(self) -> None:
        """All handlers have run, or none."""
        called, self._entries = tuple(self._entries), []
        if called not in self._known:
            self._known[called] = called, _by_ranks(called)
        called, digests = self._known[called]  # one object for all steps that are alike
        for ranks, digest in digests.items():
            self.digests[ranks] = digest_of(f"{self.digests[ranks]} {digest}")
        self.steps.append(called)

    def forget(self) -> None:
        """What was called so far was alike on all ranks."""
        self.steps.clear()
        self._known.clear()
        self._texts.clear()

    @property
    def so_far(self) -> Steps:
        """With the step that is under way."""
        return [*self.steps, tuple(self._entries)]

    def _note(self, handler: str, name: str, group: Any, given: Any) -> None:
        """A handler is about to make this collective."""
        if not self._names:
            self._names = self._places()
        match given:
            case [Tensor()]:  # of an all_reduce; looking into anything else takes longer than all the rest
                tensors = given
            case _:
                tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        found: Any = next((self._names[place] for t in tensors if (place := t.data_ptr()) in self._names), None)
        key = handler, name, group, sum(t.numel() for t in tensors) if found is None else found
        if key not in self._texts:
            self._texts[key] = _noted(*key)
        if (noted := self._texts[key]) is not None:
            entry, at = noted
            self._entries.append(entry)
            self._at(at)

    def _places(self) -> dict[int, str]:
        """By the memory of a gradient: the parameter's name."""
        self._parameters = self._parameters or list(self._named())
        gradients = ((name, p.grad) for name, p in self._parameters if p.grad is not None)
        return {local_part(grad).data_ptr(): name for name, grad in gradients if not grad.is_sparse}


def _noted(handler: str, name: str, group: Any, of: str | int) -> tuple[Entry, str] | None:
    """What is noted, and where the rank is meanwhile; None for a group of one rank."""
    ranks = tuple(dist.get_process_group_ranks(group))
    what = f"of {of!r}" if isinstance(of, str) else f"of {of} elements"
    at = f"in {handler}, at {name} {what} over ranks {list(ranks)}"
    return ((handler, f"{name} {what}", ranks), at) if len(ranks) > 1 else None


def _by_ranks(called: Sequence[Entry]) -> dict[tuple[int, ...] | None, int]:
    found: dict[tuple[int, ...] | None, list[Entry]] = {None: []}
    for entry in called:
        *_, ranks = entry
        found.setdefault(ranks or None, []).append(entry)
    return {ranks: digest_of(repr(entries)) for ranks, entries in found.items()}


def first_difference(
    one: Steps, other: Steps, ranks: Sequence[int] | None, *, under_way: bool
) -> tuple[int, str, str] | None:
    """(step, what was called on the first, what on the other) where two ranks first differ in calls over `ranks`.

    `ranks` None: in the order of handlers. `under_way`: the other may still make further calls of its last step.
    """
    wanted = tuple(ranks or ())
    for step, both in enumerate(zip(one, other, strict=False)):
        left, right = ([entry for *entry, over in called if over == wanted] for called in both)
        if under_way and step + 1 == len(other):
            left = left[: len(right)]
        for at, (mine, theirs) in enumerate(zip_longest(left, right)):
            if mine != theirs:
                return step, _said(mine, at), _said(theirs, at)
    return None


def read_steps(told: Any) -> Steps:
    """Steps that came as JSON."""
    return [tuple((who, what, tuple(ranks)) for who, what, ranks in called) for called in told]


def _said(entry: Sequence[str] | None, at: int) -> str:
    if entry is None:
        return f"makes no further call after {at}"
    who, what = entry
    return f"{who} {what}" if what in ("begins", _PLANNED) else f"{who} calls {what}"
