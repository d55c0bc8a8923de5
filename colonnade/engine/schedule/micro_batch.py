"""Micro-batches of a pipeline: splits a batch along dimension 0, calls a stage on a micro-batch, and joins the results.

`split_into_micro_batches` and `join` are inverses. `call_module` calls a stage on the output of the previous one; if the stage
does not accept the output, the error shows the signature and the value.
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

SAME_BATCHES_ADVICE = (
    "Use colonnade.utils.get_dataloader, or shard by gpc.get_local_rank(ParallelMode.DATA): a DistributedSampler without "
    "num_replicas= and rank= gives every rank of the world different samples"
)
"""Advice for ranks that need the same data and were given different batches."""


@dataclass
class MicroBatch:
    """One micro-batch. The function `forward` of an executor may set `label`."""

    index: int
    data: Any = None
    label: Any = None
    weight: float = 1.0
    """Its contribution to the loss of the batch; for a mean, all weights add up to 1."""
    rows: int | None = None
    """Its number of rows of the batch, 0 for a copy; None if no batch was given."""
    counts: bool = True
    """Whether its loss and output count; False for a copy that fills up a short batch."""


def split_into_micro_batches(data: Any, label: Any, count: int, fill: bool = False) -> list[MicroBatch]:
    """Split a batch into `count` micro-batches, whose sizes differ by at most one row, larger ones first.

    Tensors are split along dimension 0, at any depth of tuples, lists and dicts; 0-d tensors and other values are part of every
    micro-batch. The weight of a micro-batch is its fraction of the rows, so that mean losses add up to the mean over the batch.

    Args:
        data: The data of the batch.
        label: Its label, or None.
        count: The number of micro-batches.
        fill: Only for evaluation: if a batch has fewer than `count` rows, add copies of its last row, whose loss and output do
            not count.

    Raises:
        ScheduleError: If the batch has too few rows, or tensors with different numbers of rows.
    """
    rows = _rows(data, label)
    if fill and 0 < rows < count:
        pieces = split_into_micro_batches(data, label, rows)
        return pieces + [
            replace(pieces[-1], index=index, weight=0.0, rows=0, counts=False) for index in range(rows, count)
        ]
    if rows == 0:
        raise ScheduleError(
            "a batch of 0 rows cannot be split, because a pipeline needs at least one row in each micro-batch. Skip "
            "empty batches on all ranks of the pipeline (`if len(data)`). Or correct the sampler or filter that made "
            "the empty batch.",
            code="C052",
        )
    if rows < count:
        raise ScheduleError(
            f"a batch of {rows} rows cannot be split into {count} micro-batches. Set num_microbatches to "
            f"{rows} or less, use larger batches, or set drop_last=True on the data loader.",
            code="C052",
        )
    sizes = [rows // count + (index < rows % count) for index in range(count)]
    parts = zip(_split(data, sizes), _split(label, sizes), sizes, strict=True)
    return [MicroBatch(index, inputs, target, size / rows, size) for index, (inputs, target, size) in enumerate(parts)]


def join(pieces: Sequence[Any]) -> Any:
    """Join the pieces into one value: tensors are concatenated along dimension 0, 0-d tensors are stacked, equal other values are
    kept once.

    Tensors whose shapes differ in other dimensions than 0, and other values that differ, become a list.
    """
    leaves, (spec, *others) = zip(*map(tree_flatten, pieces), strict=True)
    if any(other != spec for other in others):
        return list(pieces)
    joined: list[Any] = []
    for items in map(list, zip(*leaves, strict=True)):
        first = items[0]
        tensors = [isinstance(item, Tensor) for item in items]
        if all(tensors) and all(item.dim() == 0 for item in items):
            joined.append(torch.stack(items))
        elif all(tensors) and all(item.dim() and item.shape[1:] == first.shape[1:] for item in items):
            joined.append(torch.cat(items))
        else:
            joined.append(first if not any(tensors) and all(item == first for item in items[1:]) else items)
    return tree_unflatten(joined, spec)


def _rows(data: Any, label: Any) -> int:
    """The number of rows, which must be the same for all tensors of the batch."""
    sizes = {
        name + keystr(path): leaf.size(0)
        for name, value in (("data", data), ("label", label))
        for path, leaf in tree_flatten_with_path(value)[0]
        if isinstance(leaf, Tensor) and leaf.dim()
    }
    if not sizes:
        raise ScheduleError("the batch has no tensor with rows (dimension 0), so it cannot be split", code="C052")
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ScheduleError(
            f"the tensors of a batch have different numbers of rows: {found}. They are split along dimension 0 and "
            "must have the same number of rows. If a tensor belongs to all rows, make it a buffer of the model, or "
            "pass it as a non-tensor.",
            code="C052",
        )
    return next(iter(sizes.values()))


def _split(value: Any, sizes: Sequence[int]) -> list[Any]:
    leaves, spec = tree_flatten(value)
    columns = [
        torch.split(leaf, list(sizes)) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * len(sizes)
        for leaf in leaves
    ]
    return [tree_unflatten([column[index] for column in columns], spec) for index in range(len(sizes))]


# --- A stage called on a micro-batch ---

_ABOUT_FORM = re.compile(r"shape|size|dtype|must match|expected|dimension", re.IGNORECASE)


def call_module(stage: int, module: nn.Module, inputs: Any, micro_batch: MicroBatch) -> Any:
    """Call a stage on its inputs: a dict is passed by keyword, a tuple or list by position, any other value as the single argument.

    This is the default `forward` of an executor. A stage of an nn.Sequential gets its inputs as a single argument, as in
    nn.Sequential.
    """
    one_value = stage > 0 and isinstance(module, Stage) and module.takes_one_value
    try:
        return call_layer(module, inputs, one_value)
    except (TypeError, RuntimeError) as error:
        if stage > 0 and (reason := stage_mismatch(module, inputs, one_value, error)):
            raise ScheduleError(
                f"stage {stage} cannot take the output of stage {stage - 1}: {reason}\n"
                f"  stage {stage - 1} returns: {format_value(inputs)}\n"
                f"  stage {stage} takes: {format_signature(module)}",
                code="C053",
            ) from error
        raise


def stage_mismatch(module: nn.Module, inputs: Any, one_value: bool, error: Exception) -> str | None:
    """The reason why a stage cannot take these inputs; None if `error` is about something else."""
    if isinstance(error, TypeError):
        bind = inspect.signature(_first_layer(module).forward).bind
        try:
            call_layer(bind, inputs, one_value)
        except TypeError as mismatch:
            return str(mismatch)
        return None
    return str(error) if type(error) is RuntimeError and _ABOUT_FORM.search(str(error)) else None


def format_value(value: Any) -> str:
    """Format a nested value on one line; tensors are shown by dtype and shape."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {format_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(format_value, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return repr(value)


def format_signature(module: nn.Module) -> str:
    """Format the signature of the first layer of a stage, and the shapes of that layer's own weights."""
    first = _first_layer(module)
    weights = ", ".join(f"{name} {list(parameter.shape)}" for name, parameter in first.named_parameters(recurse=False))
    return f"{type(first).__name__}.forward{inspect.signature(first.forward)}" + (f" with {weights}" if weights else "")


def _first_layer(module: nn.Module) -> nn.Module:
    return module.get_submodule(next(iter(module.layer_names))) if isinstance(module, Stage) else module
