"""Passes without training through a model whose layers are split over ranks: all these ranks must make them.

A rank that evaluates alone, under `if rank == 0`, would meet the sums of the others' training step in its own, and get a number
that is wrong. So before each such pass the ranks of a group meet, apart from the collectives of the model: the first time by
the store of the world, then by connections of their own. Passes of training meet nobody.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from colonnade.comm import waits
from colonnade.comm.rank_group import own_gloo
from colonnade.comm.torch_versions import default_store, gloo_all_gather, timeout_of
from colonnade.comm.waits import OUTSIDE, pauses, place_of
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import GradientError, listed
from colonnade.parallel.held import Held, held_tensors
from colonnade.parallel.hooks import ModelHook
from colonnade.parallel.placement import Shard


class Evaluations:
    """Watches the calls of a model; one whose parameters are split over no ranks, or are stages, not at all."""

    def __init__(self, model: nn.Module, context: ParallelContext) -> None:
        held = _held(model, context)
        self._meetings = [_Meeting(mode, context) for mode in _split_over(held, context)]
        self._handles: list[Any] = []
        self._inside: nn.Module | None = None
        # Not a reference to this object: it would never go.
        watch = weakref.ref(self)
        for module in _entries(model, held) if self._meetings else ():
            before, after = (ModelHook(partial(act, watch)) for act in (_meet, _leave))
            self._handles.append(module.register_forward_pre_hook(before, prepend=True))
            self._handles.append(module.register_forward_hook(after, always_call=True))

    def meet(self, module: nn.Module) -> None:
        """Before a pass without training through `module`. Collective over each group that the model is split over."""
        if self._inside is not None:
            return
        for meeting in self._meetings:
            meeting()
        self._inside = module

    def leave(self, module: nn.Module) -> None:
        """After a pass through `module`, whatever its end."""
        if self._inside is module:
            self._inside = None

    def close(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()


def _meet(watch: weakref.ref[Evaluations], module: nn.Module, *_: Any) -> None:
    if (module.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return
    alive = watch()
    if alive is not None:
        alive.meet(module)


def _leave(watch: weakref.ref[Evaluations], module: nn.Module, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    alive = watch()
    if alive is not None:
        alive.leave(module)


def _held(model: nn.Module, context: ParallelContext) -> list[Held]:
    if context.world_size == 1 or context.pipeline_parallel_size > 1 or dist.get_backend() == "fake":
        return []
    return held_tensors(model, context)


def _entries(model: nn.Module, held: Sequence[Held]) -> list[nn.Module]:
    """Where a script may enter: the model; what it wraps, as peft's does, whose `generate` goes around the wrapper; and the parts
    of the innermost, such as an encoder. Not what is inside these, for the time that hooks take."""
    split = {id(entry.tensor) for entry in held if any(_is_split(spec) for spec in entry.placement.modes.values())}
    inside = {part: len(split.intersection(map(id, part.parameters()))) for part in model.modules()}
    found, module = [model], model
    while True:
        parts = [part for part in module.children() if inside[part]]
        if len(parts) != 1:
            return found + [part for part in parts if any(True for _ in part.children())]
        (module,) = parts
        found.append(module)


def _is_split(spec: Any) -> bool:
    return isinstance(spec, Shard) and spec.owes != "nothing"


def _split_over(held: Sequence[Held], context: ParallelContext) -> list[ParallelMode]:
    """The modes over which parameters are split, so that forward passes need all their ranks; one for each set of ranks."""
    specs = {mode: spec for entry in held for mode, spec in entry.placement.modes.items() if _is_split(spec)}
    found: dict[tuple[int, ...], ParallelMode] = {}
    for mode in sorted(specs, key=lambda mode: mode.name):
        ranks = tuple(context.get_ranks_in_group(mode)) if context.is_initialized(mode) else ()
        if len(ranks) > 1 and mode is not ParallelMode.DATA:
            found.setdefault(ranks, mode)
    return list(found.values())


class _Meeting:
    """The ranks of one group, which all come to it or none."""

    def __init__(self, mode: ParallelMode, context: ParallelContext) -> None:
        self._mode, self._group, self._waits = mode, context.get_group(mode), context.waits
        self._rank, self._ranks = context.get_global_rank(), tuple(context.get_ranks_in_group(mode))
        self._seconds = timeout_of(self._group).total_seconds()
        self._gloo: Any = None
        self._here = (
            torch.empty(len(self._ranks), dtype=torch.uint8, device="cpu"),
            torch.zeros(1, dtype=torch.uint8, device="cpu"),
        )

    def __call__(self) -> None:
        with self._waits.during(f"{OUTSIDE}, in an evaluation"):
            if self._gloo is None:
                self._by_store()
                self._gloo = own_gloo(self._group)
                return
            work, began = gloo_all_gather(self._gloo, *self._here), time.monotonic()
            seconds = 1.5 * waits.SAY_AFTER
            while not self._has_ended(work, seconds):
                self._look(began)
                seconds = waits.SAY_AFTER / 5

    def _by_store(self) -> None:
        store, key = default_store(), f"colonnade/evaluation/{self._ranks}"
        count, began = store.add(key, 1), time.monotonic()
        whole = -(-count // len(self._ranks)) * len(self._ranks)
        look = began + 1.5 * waits.SAY_AFTER
        for pause in pauses(0.05):
            if count >= whole:
                return
            if time.monotonic() > look:
                look += waits.SAY_AFTER / 5
                try:
                    self._look(began)
                except GradientError:
                    store.add(key, -1)
                    raise
            time.sleep(pause)
            count = store.add(key, 0)

    def _has_ended(self, work: Any, seconds: float) -> bool:
        """Whether all have come, after at most so many seconds; an error of the connections is raised."""
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if work.is_completed():
                raise
            return False
        return True

    def _look(self, began: float) -> None:
        """Raise where a rank is busy with a step that it cannot make without this rank."""
        for rank in self._ranks:
            place = place_of(rank) if rank != self._rank else None
            if (
                place is not None
                and not place.what.startswith(OUTSIDE)
                and (place.step or 0) >= (self._waits.step or 0)
            ):
                raise self._alone(f"rank {rank} is {place} meanwhile")
        if time.monotonic() - began > self._seconds:
            raise self._alone(f"not all of them have come for {self._seconds:g} s")

    def _alone(self, what: str) -> GradientError:
        return GradientError(
            f"the model is called without training on rank {self._rank}, and {what}. Its parameters are split over ranks "
            f"{listed(self._ranks)} of {self._mode.name}, so a pass needs all of them: evaluate and generate on every rank, and "
            f"only print and log under a condition such as `if rank == 0`",
            code="C130",
        )
