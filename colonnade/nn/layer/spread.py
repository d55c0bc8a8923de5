"""`Spread`: the sharding of an activation, conversions between spreads, and a check of consecutive layers.

Placements are for parameters; a spread is for the tensors between layers, [batch, sequence, hidden]: the mode that shards
each of the three dimensions. Every layer declares the spread of its input and output with `check_input` and `mark_output`;
until the end of the first step these are compared (second section).
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
from colonnade.parallel.held import replicated_parameters
from colonnade.parallel.placement import Replicate, Shard, Spec

if TYPE_CHECKING:
    from colonnade.nn.layer.arrangement import Arrangement, Side


@dataclass(frozen=True)
class Spread:
    """The sharding of an activation: for each dimension the mode that shards it, None if the dimension is not sharded."""

    batch: ParallelMode | None = None
    sequence: ParallelMode | None = None
    hidden: ParallelMode | None = None

    @property
    def by_dim(self) -> tuple[ParallelMode | None, ParallelMode | None, ParallelMode | None]:
        """The modes that shard the batch, sequence and hidden dimensions."""
        return self.batch, self.sequence, self.hidden

    @property
    def modes(self) -> tuple[ParallelMode, ...]:
        """The modes that shard a dimension."""
        return tuple(mode for mode in self.by_dim if mode is not None)

    def along_hidden(self) -> dict[ParallelMode, Spec]:
        """Return the placement of a parameter along the hidden dimension, such as a bias or the weight of a norm.

        The parameter is sharded like the hidden dimension. Over the modes of batch and sequence its gradient is
        partial, because each rank has its own samples and tokens.
        """
        placed: dict[ParallelMode, Spec] = {self.hidden: Shard(-1)} if self.hidden is not None else {}
        for mode in (self.batch, self.sequence):
            if mode is not None:
                placed[mode] = Replicate(owes="sum")
        return placed


Dims = tuple[int | None, int | None, int | None]
"""The dimensions of batch, sequence and hidden in a tensor; None for a dimension that it lacks."""

ACTIVATION: Dims = (0, -2, -1)


@dataclass(frozen=True)
class Width:
    """The sharding of the hidden dimension: `features` in total, in multiples of `unit`, into shards that may be `uneven`."""

    features: int | None = None
    unit: int = 1
    uneven: bool = False


EQUAL = Width()


def scatter(
    x: Tensor, spread: Spread, context: ParallelContext, dims: Dims = ACTIVATION, width: Width = EQUAL
) -> Tensor:
    """Return this rank's shard of a replicated x. Backward all-gathers the gradients."""
    for mode, dim, name in _sharded_dims(spread, dims):
        rule = width if name == "hidden" else EQUAL
        sizes = shard_sizes(x.shape[dim], mode, context, name, rule.unit, not rule.uneven)
        x = collectives.scatter(x, mode, dim, sizes, context=context)
    return x


def gather(
    x: Tensor, spread: Spread, context: ParallelContext, dims: Dims = ACTIVATION, width: Width = EQUAL
) -> Tensor:
    """All-gather the shards of x to the full activation. Backward takes this rank's shard of the gradient."""
    for mode, dim, name in _sharded_dims(spread, dims):
        sizes = (x.shape[dim],) * size_of(mode, context)
        if name == "hidden" and width.features is not None:
            sizes = shard_sizes(width.features, mode, context, name, width.unit, not width.uneven)
        x = collectives.gather(x, mode, dim, sizes, context=context)
    return x


def respread(x: Tensor, source: Spread, target: Spread, context: ParallelContext, width: Width = EQUAL) -> Tensor:
    """Convert x from one spread to another: dimensions whose mode changes are gathered and sharded again."""
    pairs = list(zip(source.by_dim, target.by_dim, strict=True))
    leave = Spread(*(old if old is not new else None for old, new in pairs))
    enter = Spread(*(new if old is not new else None for old, new in pairs))
    return scatter(gather(x, leave, context, ACTIVATION, width), enter, context, ACTIVATION, width)


def shard_sizes(
    length: int, mode: ParallelMode, context: ParallelContext, name: str, unit: int = 1, even: bool = True
) -> tuple[int, ...]:
    """Return the lengths of the shards over a mode.

    Raises PlacementError if `length` cannot be sharded in multiples of `unit`, or with `even`, into equal shards.
    """
    ranks = size_of(mode, context)
    units = f"{length // unit} x {unit}" if unit > 1 else f"{length}"
    if length % unit or (even and (length // unit) % ranks):
        raise PlacementError(
            f"{name} of size {units} cannot be sharded evenly over the {ranks} ranks of {mode}. Choose a size that "
            f"{ranks} divides, or another tensor size.",
            code="C032",
        )
    return collectives.split_sizes(length, mode, unit, context=context)


def size_of(mode: ParallelMode, context: ParallelContext) -> int:
    """Return the number of ranks of a mode; 1 without a group."""
    return context.get_world_size(mode) if context.is_initialized(mode) else 1


def _sharded_dims(spread: Spread, dims: Dims) -> Iterator[tuple[ParallelMode, int, str]]:
    """(mode, dimension, name) of the sharded dimensions that the tensor has."""
    for mode, dim, name in zip(spread.by_dim, dims, ("batch", "sequence", "hidden"), strict=True):
        if mode is not None and dim is not None:
            yield mode, dim, name


# --- Checks before the end of the first step: a layer whose input has another spread than it expects raises ---
#
# A layer of torch.nn between sharded layers takes a shard for the full activation, and so does a layer of colonnade.nn that
# expects another spread; shapes may fit anyway. Each layer of colonnade.nn marks its output in the autograd graph, and each
# checks the nearest marks behind its input. After the first step there are no marks and no checks, and no cost.

_MARK = "colonnade_spread"
_watched: dict[int, ref[FirstPass]] = {}
"""The active checks by the id of their context.

The engine keeps its `FirstPass` alive; empty after the first step of all engines.
"""


def check_input(
    layer: nn.Module | str, here: Arrangement, x: Tensor, side: Side, features: int | None = None, unit: int = 1
) -> None:
    """Check that x has the spread of `side`, and that its hidden size is this rank's share of `features`."""
    watch = _watch(here)
    if watch is None:
        return
    name, spread = watch.name(layer), here.side(side)
    watch.check(name, x, spread)
    if features is None:
        return
    sizes = here.hidden_sizes(features, side, unit if side == "inner" else 1)
    width = features if spread.hidden is None else sizes[here.context.get_local_rank(spread.hidden)]
    if x.shape[-1] != width:
        raise PlacementError(
            f"{name} takes {width} of {features} features on this rank, because its input is {_text(spread)}, but "
            f"the input has {x.shape[-1]} features. After Linear(split='column') use Linear(split='row'), or set "
            "gather_output=True. partition_input(x) shards a replicated activation. gather_output(x) replicates a "
            "sharded activation.",
            code="C033",
        )


def check_full_input(layer: str, here: Arrangement, x: Tensor) -> None:
    """Check that x is replicated."""
    watch = _watch(here)
    if watch is not None:
        watch.check(layer, x, Spread())


def mark_output(layer: nn.Module | str, here: Arrangement, y: Tensor, spread: Spread) -> Tensor:
    """Return y, after marking it in the autograd graph as an output of the layer with this spread."""
    watch = _watch(here)
    if watch is not None:
        mark = (watch.split_only(spread), watch.name(layer))
        if y.grad_fn is not None:
            cast(Any, y.grad_fn).metadata[_MARK] = mark
        elif mark[
            0
        ].modes:  # no graph yet (frozen layers, or no_grad): the tensor itself carries the mark to the next layer
            setattr(y, _MARK, mark)
    return y


def _watch(here: Arrangement) -> FirstPass | None:
    if torch.compiler.is_compiling() or not _watched:
        return None
    found = _watched.get(id(here.context))
    return None if found is None else found()


class FirstPass:
    """The checks of layer inputs in one model, from `initialize` to its first step.

    Inactive if no layer is sharded, or if some are compiled.
    """

    def __init__(self, model: nn.Module, context: ParallelContext) -> None:
        self._context = context
        self._handles: list[Any] = []
        modules = dict(model.named_modules())
        arrangements: list[Any] = [getattr(module, "arrangement", None) for module in modules.values()]
        # Compiled code sets no marks (see `_watch`), so an activation behind a compiled module could not be judged.
        if not any(
            hasattr(a, "is_split") and (a.is_split("outer") or a.is_split("inner")) for a in arrangements
        ) or any(getattr(module, "_compiled_call_impl", None) for module in modules.values()):
            return
        self._names = {id(module): name for name, module in modules.items()}
        self._replicated = replicated_parameters(model, context, ParallelMode.TENSOR)
        for name, module in modules.items():
            replicated = [p for p in module.parameters(recurse=False) if id(p) in self._replicated]
            is_plain = type(module).__module__.startswith("torch.nn.") and not hasattr(module, "arrangement")
            if is_plain and replicated:
                hook = _PlainLayer(name, self._replicated[id(replicated[0])])
                self._handles.append(module.register_forward_pre_hook(hook))
        _watched[id(context)] = ref(self)

    def close(self) -> None:
        """End the checks and remove the hooks."""
        for handle in self._handles:
            handle.remove()
        found = _watched.get(id(self._context))
        if found is not None and found() in (self, None):
            del _watched[id(self._context)]

    def name(self, layer: nn.Module | str) -> str:
        """Return the type of a layer and its name in the model, for messages."""
        if isinstance(layer, str):
            return layer
        kind = type(layer).__name__
        return f"{kind} {self._names[id(layer)]!r}" if id(layer) in self._names else kind

    def split_only(self, spread: Spread) -> Spread:
        """Return the spread without modes that have a single rank."""
        return Spread(
            *(mode if mode is not None and size_of(mode, self._context) > 1 else None for mode in spread.by_dim)
        )

    def check(self, layer: str, x: Tensor, spread: Spread) -> None:
        """Raise PlacementError if x does not have the expected spread.

        Also raises if a replicated parameter took part in computing x although x should be a shard.
        """
        expected = self.split_only(spread)
        marks, leaves = _behind(x)
        for found, source in marks:
            if found != expected:
                raise PlacementError(
                    f"{layer} takes an activation that is {_text(expected)}, but got the output of {source}, which "
                    f"is {_text(found)}. After Linear(split='column') use Linear(split='row'), or set "
                    "gather_output=True. partition_input(x) shards a replicated activation. gather_output(x) "
                    "replicates a sharded activation.",
                    code="C033",
                )
        plain = [self._replicated[id(leaf)] for leaf in leaves if id(leaf) in self._replicated]
        if expected.modes and plain:
            raise PlacementError(
                f"{layer} takes an activation that is {_text(expected)}, but its input was computed with "
                f"{plain[0]!r}, a parameter that is replicated on every rank. There are two possible causes. 1. The "
                f"layer of {plain[0]!r} treated a shard as the full activation: replace it by the layer of "
                f"colonnade.nn, or place() the parameter. In a TP plan, give the layer of {plain[0]!r} the style "
                "'replicated_with_grad_allreduce'. 2. The result of the layer is replicated: shard it with "
                "partition_input(x).",
                code="C033",
            )


class SplitLayers(ModelFamily):
    """The `ModelFamily` of models with layers of colonnade.nn."""

    def watch_first_step(self, model: nn.Module, context: ParallelContext) -> FirstPass:
        return FirstPass(model, context)


FAMILY = SplitLayers()


class _PlainLayer:
    """A forward pre-hook of a layer of torch.nn: its weights are replicated, so its input must not be a shard."""

    def __init__(self, name: str, parameter: str) -> None:
        self._name, self._parameter = name, parameter

    def __call__(self, module: nn.Module, args: Sequence[Any]) -> None:
        tensors = [x for x in args if isinstance(x, Tensor)] if not torch.compiler.is_compiling() else []
        for spread, source in (mark for x in tensors for mark in _behind(x)[0]):
            if spread.modes:
                kind = type(module).__name__
                raise PlacementError(
                    f"{self._name!r} is a plain {kind}, replicated on every rank ({self._parameter!r} is not "
                    f"placed), but got the output of {source}, which is {_text(spread)}. The layer would treat the "
                    f"shard as the full activation. Replace {self._name!r} by the layer of colonnade.nn, or call "
                    f"gather_output(x) before it. In a TP plan, give {self._name!r} the style 'rowwise'. If the "
                    "layer treats each shard alike, such as a norm of each head, use "
                    "'replicated_with_grad_allreduce'.",
                    code="C033",
                )


def _behind(x: Tensor) -> tuple[list[tuple[Spread, str]], list[Tensor]]:
    """The nearest marks in the graph behind x, and the leaves that are reached without passing a mark.

    The search stops at a custom autograd function (a collective, a checkpoint), which may change the spread.
    """
    if x.grad_fn is None:
        return ([getattr(x, _MARK)], []) if hasattr(x, _MARK) else ([], [x])
    marks, leaves, seen = [], [], set()
    queue: list[Any] = [x.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _MARK in node.metadata:
            marks.append(node.metadata[_MARK])
        elif hasattr(node, "variable"):
            leaves.append(node.variable)
        elif not isinstance(node, BackwardCFunction):
            queue += [before for before, _ in node.next_functions]
    return marks, leaves


def _text(spread: Spread) -> str:
    dims = zip(("batch", "sequence", "hidden"), spread.by_dim, strict=True)
    sharded = [f"{name} over {mode.name}" for name, mode in dims if mode is not None]
    return "sharded, " + " and ".join(sharded) if sharded else "replicated"
