"""What is said once, when a model trains, but not as its user may think."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import listed
from colonnade.logging import get_dist_logger
from colonnade.parallel.held import whole_parameters


def warn_of_batch_norm(model: nn.Module, context: ParallelContext) -> None:
    """Say once that batch norms see a part of the batch each; frozen ones (in evaluation mode) do not look at it."""
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training
    ]
    here = context.layout.coordinates(context.get_global_rank())
    first = all(at == 0 for name, at in here.items() if name != "pipeline")
    if found and first and (context.layout.distinct_data > 1 or context.pipeline_parallel_size > 1):
        get_dist_logger().warning(
            f"{type(model.get_submodule(found[0])).__name__} ({listed(found[:3])}{', ...' if len(found) > 3 else ''}) "
            f"normalises over the rows that one rank has at a time, not over the whole batch: gradients are not those of "
            f"one process, and running statistics differ between ranks (a checkpoint for another layout has the first "
            f"rank's). On CUDA, nn.SyncBatchNorm.convert_sync_batchnorm(model, gpc.get_group(ParallelMode.DATA)) before "
            f"initialize joins the ranks; a norm that looks at single samples (GroupNorm, LayerNorm) has no such limit."
        )


def warn_of_repeated_work(model: nn.Module, context: ParallelContext) -> None:
    """Ranks that see the same data and split no parameter compute the same; layers of ours split nothing without a mode."""
    say = get_dist_logger().warning
    count = len(list(model.parameters()))
    for axis in context.layout.axes:
        if axis.size == 1 or axis.data == "distinct" or axis.mode is ParallelMode.PIPELINE:
            continue
        if count and len(whole_parameters(model, context, axis.mode)) == count:
            say(
                f"no parameter of the model is split over the {axis.size} ranks of {axis.mode.name}: they repeat each other's "
                f"work. Build the model from the layers of colonnade.nn with tensor=dict(size={axis.size}, mode='1d'), "
                f"place() what you split yourself, or take {axis.name!r} out of `parallel`: these ranks then share the data",
                ranks=[0],
            )
    found: list[Any] = [getattr(layer, "arrangement", None) for layer in model.modules()]
    arrangements = [arrangement for arrangement in found if hasattr(arrangement, "is_split")]
    size = context.tensor_parallel_size
    if size > 1 and arrangements and not any(a.is_split("outer") or a.is_split("inner") for a in arrangements):
        say(
            f"the layers of colonnade.nn in the model are whole on each of the {size} ranks of TENSOR, as `tensor` names no "
            f"mode that splits them; write tensor=dict(size={size}, mode='1d')",
            ranks=[0],
        )
