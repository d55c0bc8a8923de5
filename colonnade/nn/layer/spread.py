"""Spread: how an activation lies on the modes, the way from one spread to another, and the check that layers fit.

A placement is of a parameter; a spread is of the tensors between layers, [batch, sequence, hidden]: which mode
splits which of the three. Every layer says with `takes` and `gives` how its input and its output lie; until the first step is
over that is compared (second section).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.model import ModelFamily
from colonnade.errors import PlacementError
from colonnade.parallel import collectives
from colonnade.parallel.held import whole_parameters
from colonnade.parallel.placement import Replicate, Shard, Spec

if TYPE_CHECKING:
    from colonnade.nn.layer.arrangement import Arrangement, Side


@dataclass(frozen=True)
class Spread:
    """The mode that splits each dimension of an activation; None where it is whole."""

    batch: ParallelMode | None = None
    sequence: ParallelMode | None = None
    hidden: ParallelMode | None = None

    @property
    def modes(self) -> tuple[ParallelMode, ...]:
        """The modes that split anything."""
        return tuple(mode for mode in (self.batch, self.sequence, self.hidden) if mode is not None)

    def along_hidden(self) -> dict[ParallelMode, Spec]:
        """The placement of a parameter that lies along the hidden dimension: a bias, the weight of a norm.

        Each rank sees a part of the batch and of the sequence, so over those modes its gradient owes a sum.
        """
        placed: dict[ParallelMode, Spec] = {self.hidden: Shard(-1)} if self.hidden is not None else {}
        for mode in (self.batch, self.sequence):
            if mode is not None:
                placed[mode] = Replicate(owes="sum")
        return placed


Dims = tuple[int | None, int | None, int | None]
"""Where batch, sequence and hidden are in a tensor; None where it has no such dimension."""

ACTIVATION: Dims = (0, -2, -1)


@dataclass(frozen=True)
class Width:
    """How the hidden dimension is cut: a whole of `features`, in multiples of `unit`, into parts that may be uneven."""

    features: int | None = None
    unit: int = 1
    uneven: bool = False


EQUAL = Width()


def scatter(
    x: Tensor, spread: Spread, context: ParallelContext, dims: Dims = ACTIVATION, width: Width = EQUAL
) -> Tensor:
    """This rank's part of a whole x. Backward joins everybody's gradient."""
    for mode, dim, name in _split_dims(spread, dims):
        how = width if name == "hidden" else EQUAL
        sizes = cut(x.shape[dim], mode, context, name, how.unit, not how.uneven)
        x = collectives.scatter(x, mode, dim, sizes, context=context)
    return x


def gather(
    x: Tensor, spread: Spread, context: ParallelContext, dims: Dims = ACTIVATION, width: Width = EQUAL
) -> Tensor:
    """The whole of an x of this spread, on every rank. Backward takes this rank's part of the gradient."""
    for mode, dim, name in _split_dims(spread, dims):
        sizes = (x.shape[dim],) * size_of(mode, context)
        if name == "hidden" and width.features is not None:
            sizes = cut(width.features, mode, context, name, width.unit, not width.uneven)
        x = collectives.gather(x, mode, dim, sizes, context=context)
    return x


def respread(x: Tensor, source: Spread, target: Spread, context: ParallelContext, width: Width = EQUAL) -> Tensor:
    """From one spread to another: what lies elsewhere is gathered and split anew."""
    pairs = list(zip(_each(source), _each(target), strict=True))
    leave = Spread(*(old if old is not new else None for old, new in pairs))
    enter = Spread(*(new if old is not new else None for old, new in pairs))
    return scatter(gather(x, leave, context, ACTIVATION, width), enter, context, ACTIVATION, width)


def cut(
    length: int, mode: ParallelMode, context: ParallelContext, what: str, unit: int = 1, even: bool = True
) -> tuple[int, ...]:
    """The lengths of the parts over a mode; refuses what cannot be cut (evenly, in multiples of `unit`)."""
    ranks = size_of(mode, context)
    pieces = f"{length // unit} x {unit}" if unit > 1 else f"{length}"
    if length % unit or (even and (length // unit) % ranks):
        raise PlacementError(
            f"{what} of size {pieces} cannot be cut evenly over the {ranks} ranks of {mode}; "
            f"choose a size that {ranks} divides, or another tensor size",
            code="C032",
        )
    return collectives.split_sizes(length, mode, unit, context=context)


def size_of(mode: ParallelMode, context: ParallelContext) -> int:
    """How many ranks a mode has here; one where it has no group."""
    return context.get_world_size(mode) if context.is_initialized(mode) else 1


def _split_dims(spread: Spread, dims: Dims) -> Iterator[tuple[ParallelMode, int, str]]:
    """(mode, dimension, name) of what is split and there."""
    for mode, dim, name in zip(_each(spread), dims, ("batch", "sequence", "hidden"), strict=True):
        if mode is not None and dim is not None:
            yield mode, dim, name


def _each(spread: Spread) -> tuple[ParallelMode | None, ParallelMode | None, ParallelMode | None]:
    return spread.batch, spread.sequence, spread.hidden


# --- The passes before the first step, watched: an activation that lies otherwise than a layer takes it is an error by name ---
#
# A plain layer inside the split part of a model takes a part for the whole, and so does a layer of ours that expects
# another spread: shapes may fit all the same. What each of our layers gives is marked in the autograd graph, and each
# looks from what it gets back to the marks before it. After the first step nobody marks or looks any more.

_MARK = "colonnade_spread"
_SIDES = ("outer", "inner")
_watched: dict[int, ref[FirstPass]] = {}
"""By the id of the context. An engine keeps its own alive; empty, and quickly looked at, once all have made a step."""


def takes(
    who: nn.Module | str, here: Arrangement, x: Tensor, side: Side, features: int | None = None, unit: int = 1
) -> None:
    """`who` takes x in the spread of `side`, with this rank's part of so many features."""
    watch = _watch(here)
    if watch is not None:
        watch.check(watch.name(who), x, here.side(side))
        if features is not None:
            _check_width(watch.name(who), here, x, side, features, unit)


def takes_whole(who: str, here: Arrangement, x: Tensor) -> None:
    """`who` takes an x that is whole on every rank."""
    watch = _watch(here)
    if watch is not None:
        watch.check(who, x, Spread())


def gives(who: nn.Module | str, here: Arrangement, y: Tensor, spread: Spread) -> Tensor:
    """`who` gives y in this spread."""
    watch = _watch(here)
    if watch is not None:
        mark = (watch.split_only(spread), watch.name(who))
        if y.grad_fn is not None:
            cast(Any, y.grad_fn).metadata[_MARK] = mark
        elif mark[0].modes:  # nothing is differentiated yet: the part itself carries the mark, to the next layer
            setattr(y, _MARK, mark)
    return y


def _watch(here: Arrangement) -> FirstPass | None:
    if torch.compiler.is_compiling() or not _watched:
        return None
    found = _watched.get(id(here.context))
    return None if found is None else found()


class FirstPass:
    """Watches a model whose layers are split, from `initialize` to its first step; one that is not split, not at all."""

    def __init__(self, model: nn.Module, context: ParallelContext) -> None:
        self._context = context
        self._handles: list[Any] = []
        modules = dict(model.named_modules())
        arrangements: list[Any] = [getattr(module, "arrangement", None) for module in modules.values()]
        if not any(
            hasattr(a, "is_split") and (a.is_split("outer") or a.is_split("inner")) for a in arrangements
        ) or any(getattr(module, "_compiled_call_impl", None) for module in modules.values()):
            return
        self._names = {id(module): name for name, module in modules.items()}
        self._whole = whole_parameters(model, context, ParallelMode.TENSOR)
        for name, module in modules.items():
            held = [parameter for parameter in module.parameters(recurse=False) if id(parameter) in self._whole]
            plain = type(module).__module__.startswith("torch.nn.") and not hasattr(module, "arrangement")
            if plain and held:
                hook = _PlainLayer(name, self._whole[id(held[0])])
                self._handles.append(module.register_forward_pre_hook(hook))
        _watched[id(context)] = ref(self)

    def close(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        found = _watched.get(id(self._context))
        if found is not None and found() in (self, None):
            del _watched[id(self._context)]

    def name(self, who: nn.Module | str) -> str:
        """A layer with its name in the model."""
        if isinstance(who, str):
            return who
        return f"{type(who).__name__} {self._names[id(who)]!r}" if id(who) in self._names else type(who).__name__

    def split_only(self, spread: Spread) -> Spread:
        """Without modes that have one rank."""
        sized = [
            mode if mode is not None and size_of(mode, self._context) > 1 else None
            for mode in (spread.batch, spread.sequence, spread.hidden)
        ]
        return Spread(*sized)

    def check(self, who: str, x: Tensor, spread: Spread) -> None:
        """Refuse an x that lies in another spread, or that a whole parameter had a part in where parts are expected."""
        wanted = self.split_only(spread)
        marks, leaves = _behind(x)
        for found, giver in marks:
            if found != wanted:
                raise PlacementError(
                    f"{who} takes an activation that is {_text(wanted)}; it gets what {giver} gives, which is {_text(found)}. "
                    f"After Linear(split='column') comes Linear(split='row'), or it has gather_output=True; "
                    f"partition_input(x) and gather_output(x) lead into the split part of a model and out of it",
                    code="C033",
                )
        plain = [self._whole[id(leaf)] for leaf in leaves if id(leaf) in self._whole] if wanted.modes else []
        if plain:
            raise PlacementError(
                f"{who} takes an activation that is {_text(wanted)}, but what it gets was made with {plain[0]!r}, a parameter "
                f"that is whole on every rank: it has taken a part for the whole, or the result is whole. Use the layer of "
                f"colonnade.nn in its place, or place() the parameter, or bring a whole result in with partition_input(x); in "
                f"a plan, give the layer of {plain[0]!r} the style 'replicated_with_grad_allreduce'",
                code="C033",
            )


class SplitLayers(ModelFamily):
    """The family of models that have layers of colonnade.nn in them."""

    def watch_first_step(self, model: nn.Module, context: ParallelContext) -> FirstPass:
        return FirstPass(model, context)


FAMILY = SplitLayers()


class _PlainLayer:
    """A hook on a layer of torch.nn: it has whole weights, so it must not get a part."""

    def __init__(self, name: str, parameter: str) -> None:
        self._name, self._parameter = name, parameter

    def __call__(self, module: nn.Module, args: Sequence[Any]) -> None:
        tensors = [x for x in args if isinstance(x, Tensor)] if not torch.compiler.is_compiling() else []
        for spread, giver in (mark for x in tensors for mark in _behind(x)[0]):
            if spread.modes:
                kind = type(module).__name__
                raise PlacementError(
                    f"{self._name!r} is a plain {kind}, whole on every rank ({self._parameter!r} is not placed); it gets what "
                    f"{giver} gives, which is {_text(spread)}, and would take a part for the whole. Use the layer of "
                    f"colonnade.nn in its place, or gather_output(x) before it; in a plan, give {self._name!r} the style "
                    f"'rowwise', or 'replicated_with_grad_allreduce' if it treats each part alike (a norm of each head)",
                    code="C033",
                )


def _behind(x: Tensor) -> tuple[list[tuple[Spread, str]], list[Tensor]]:
    """The nearest marks in the graph that x came from, and the leaves before which there is none.

    A function with a backward of its own (a collective, a checkpoint) may change how things lie: nothing is known there.
    """
    if x.grad_fn is None:
        return ([getattr(x, _MARK)], []) if hasattr(x, _MARK) else ([], [x])
    marks, leaves, seen = [], [], set()
    waiting: list[Any] = [x.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _MARK in node.metadata:
            marks.append(node.metadata[_MARK])
        elif hasattr(node, "variable"):
            leaves.append(node.variable)
        elif not isinstance(node, BackwardCFunction):
            waiting += [before for before, _ in node.next_functions]
    return marks, leaves


def _check_width(who: str, here: Arrangement, x: Tensor, side: Side, features: int, unit: int) -> None:
    mode, sizes = here.side(side).hidden, here.hidden_sizes(features, side, unit if side == "inner" else 1)
    width = features if mode is None else sizes[here.context.get_local_rank(mode)]
    if x.shape[-1] != width:
        raise PlacementError(
            f"{who} takes {width} of {features} features here, as its input is {_text(here.side(side))}; it gets "
            f"{x.shape[-1]}. After Linear(split='column') comes Linear(split='row'), or it has gather_output=True; "
            f"partition_input(x) and gather_output(x) lead into the split part of a model and out of it",
            code="C033",
        )


def _text(spread: Spread) -> str:
    parts = [
        f"{name} over {mode.name}"
        for name, mode in (("batch", spread.batch), ("sequence", spread.sequence), ("hidden", spread.hidden))
        if mode is not None
    ]
    return "split, " + " and ".join(parts) if parts else "whole"
