"""Micro-batches of a pipeline: a batch cut on dimension 0, a stage called on one piece, and the pieces joined again.

`cut_batch` and `join` are each other's inverse. `call_module` is how a stage is called on what the stage before it gave; where
it cannot take that, the error says what one stage gives and what the other takes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from colonnade.errors import ScheduleError
from colonnade.parallel.split import Stage, call_layer

FEED_ALIKE = (
    "Use colonnade.utils.get_dataloader, or shard by gpc.get_local_rank(ParallelMode.DATA): a DistributedSampler without "
    "num_replicas= and rank= gives every rank of the world samples of its own"
)
"""What to do where ranks that see the same data were given different batches."""


@dataclass
class MicroBatch:
    """One piece of a batch. The forward hook of an executor may set `label`."""

    index: int
    data: Any = None
    label: Any = None
    weight: float = 1.0
    """Its share of the loss of the batch: all weights together are 1 for a mean."""
    rows: int | None = None
    """How many rows of the batch it has, 0 for a copy; None where no batch was given."""
    counts: bool = True
    """Whether its loss and its output are part of those of the batch."""


def cut_batch(data: Any, label: Any, count: int, fill: bool = False) -> list[MicroBatch]:
    """Cut a batch into `count` pieces whose sizes differ by at most one row, larger ones first.

    With `fill`, for a forward pass alone, a batch of fewer rows is filled up with copies of its last row that do not count.

    Tensors are cut, at any depth of tuples, lists and dicts; 0-d tensors and everything else go whole into
    every piece. The weight of a piece is its part of the rows, which makes mean losses add up to the mean
    over the batch.
    """
    rows = _rows(data, label)
    if fill and 0 < rows < count:
        pieces = cut_batch(data, label, rows)
        return pieces + [
            replace(pieces[-1], index=index, weight=0.0, rows=0, counts=False) for index in range(rows, count)
        ]
    if rows == 0:
        raise ScheduleError(
            "a batch of 0 rows cannot be cut: a pipeline sends at least one row in each micro-batch. Leave such batches out on all ranks "
            "of the pipeline (`if len(data)`), or look at what the sampler or the filter before it gives",
            code="C052",
        )
    if rows < count:
        raise ScheduleError(
            f"a batch of {rows} rows cannot be cut into {count} micro-batches. Set num_microbatches to "
            f"{rows} or less, use larger batches, or set drop_last=True on the data loader.",
            code="C052",
        )
    sizes = [rows // count + (index < rows % count) for index in range(count)]
    cuts = zip(_cut(data, sizes), _cut(label, sizes), sizes, strict=True)
    return [MicroBatch(index, item, mark, size / rows, size) for index, (item, mark, size) in enumerate(cuts)]


def join(pieces: Sequence[Any]) -> Any:
    """The pieces as one value: tensors joined on dimension 0, 0-d tensors stacked, equal values once.

    Tensors that do not fit together (another width, say) and values that differ become a list.
    """
    leaves, (spec, *others) = zip(*map(tree_flatten, pieces), strict=True)
    if any(other != spec for other in others):
        return list(pieces)
    return tree_unflatten([_join_leaf(*column) for column in zip(*leaves, strict=True)], spec)


def _join_leaf(first: Any, *others: Any) -> Any:
    items = [first, *others]
    if all(isinstance(item, Tensor) for item in items):
        if all(item.dim() == 0 for item in items):
            return torch.stack(items)
        if all(item.dim() and item.shape[1:] == first.shape[1:] for item in items):
            return torch.cat(items)
        return items
    same = not any(isinstance(item, Tensor) for item in items) and all(other == first for other in others)
    return first if same else items


def _rows(data: Any, label: Any) -> int:
    """The rows that every tensor of the batch has."""
    sizes = {
        name + keystr(path): leaf.size(0)
        for name, value in (("data", data), ("label", label))
        for path, leaf in tree_flatten_with_path(value)[0]
        if isinstance(leaf, Tensor) and leaf.dim()
    }
    if not sizes:
        raise ScheduleError("the batch holds no tensor with rows (dimension 0), so it cannot be cut", code="C052")
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ScheduleError(
            "the tensors of a batch are cut on dimension 0 and must have the same number of rows there: "
            f"{found}. What belongs to all rows is better a buffer of the model, or given as a non-tensor.",
            code="C052",
        )
    return next(iter(sizes.values()))


def _cut(value: Any, sizes: Sequence[int]) -> list[Any]:
    leaves, spec = tree_flatten(value)
    columns = [
        torch.split(leaf, list(sizes)) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * len(sizes)
        for leaf in leaves
    ]
    return [tree_unflatten([column[index] for column in columns], spec) for index in range(len(sizes))]


# --- A stage called on a micro-batch ---

_ABOUT_FORM = re.compile(r"shape|size|dtype|must match|expected|dimension", re.IGNORECASE)


def call_module(stage: int, module: nn.Module, inputs: Any, micro_batch: MicroBatch) -> Any:
    """The usual forward hook: a dict goes in by keyword, a tuple or list by position, anything else alone.

    A stage cut out of an nn.Sequential takes what the layer before it returned as one argument, as it did there.
    """
    one_value = stage > 0 and isinstance(module, Stage) and module.takes_one_value
    try:
        return call_layer(module, inputs, one_value)
    except (TypeError, RuntimeError) as error:
        if stage > 0 and (reason := stage_mismatch(module, inputs, one_value, error)):
            raise ScheduleError(
                f"stage {stage} cannot take what stage {stage - 1} gives: {reason}\n"
                f"  stage {stage - 1} gives: {format_value(inputs)}\n"
                f"  stage {stage} takes: {format_signature(module)}",
                code="C053",
            ) from error
        raise


def stage_mismatch(module: nn.Module, inputs: Any, one_value: bool, error: Exception) -> str | None:
    """The reason why a stage cannot take these inputs, if that is what the error is about."""
    if isinstance(error, TypeError):
        bind = inspect.signature(_first_layer(module).forward).bind
        try:
            call_layer(bind, inputs, one_value)
        except TypeError as mismatch:
            return str(mismatch)
        return None
    return str(error) if type(error) is RuntimeError and _ABOUT_FORM.search(str(error)) else None


def format_value(value: Any) -> str:
    """A nested value in one line: tensors as dtype and shape."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {format_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(format_value, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return repr(value)


def format_signature(module: nn.Module) -> str:
    """How the first layer of a stage is called."""
    first = _first_layer(module)
    weights = ", ".join(f"{name} {list(parameter.shape)}" for name, parameter in first.named_parameters(recurse=False))
    return f"{type(first).__name__}.forward{inspect.signature(first.forward)}" + (f" with {weights}" if weights else "")


def _first_layer(module: nn.Module) -> nn.Module:
    return module.get_submodule(next(iter(module.layer_names))) if isinstance(module, Stage) else module
