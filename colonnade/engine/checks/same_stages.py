"""Pipeline stages that are all the same model: the whole model on every rank, because nobody has called `colonnade.split`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from colonnade.comm.messages import digest_of, is_same_everywhere
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ScheduleError, listed
from colonnade.logging import get_dist_logger
from colonnade.parallel.checksum import checksum
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.placement import placement_of

_ALLOW = "set compare_stages=False in the config"
_SHOWN = 3


def forms_of(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of every parameter that the model does not share with other stages."""
    return [(name, tuple(each.shape)) for name, each in model.named_parameters() if placement_of(each).tied is None]


def compare_stages(
    model: nn.Module, was_split: bool, num_stages: int, context: ParallelContext
) -> ScheduleError | None:
    """Warn where the stages of a pipeline have parameters of equal names and shapes and were not made by `split`.

    Returns an error, to be raised on all ranks, where their values are equal too. Collective along the pipeline.
    `compare_stages=False` in the config turns this off. `num_stages`: how many the schedule runs.
    """
    ranks = context.get_world_size(ParallelMode.PIPELINE)
    if ranks == 1 or context.config.get("compare_stages") is False:
        return None
    # Every stage takes part in the collective; one that is not compared gives a number that no other stage gives.
    forms = forms_of(model)
    compared = forms and not was_split
    number = digest_of(repr(forms)) if compared else context.get_local_rank(ParallelMode.PIPELINE)
    group = context.get_group(ParallelMode.PIPELINE)
    if not is_same_everywhere(number, context.device, group):
        return None
    if is_same_everywhere(_digest_of_values(model), context.device, group):
        return ScheduleError(
            f"{same_stages(forms, ranks)}, with equal values: every rank has brought the whole model, and a step would run "
            f"{ranks} copies of it one after another. {_cut(num_stages)}. If the stages start equal on purpose, pass them as "
            f"colonnade.split([first, second, ...]), or {_ALLOW}",
            code="C160",
        )
    get_dist_logger().warning(
        f"{same_stages(forms, ranks)}. If each rank has built the whole model, a step runs {ranks} models one after another. "
        f"{_cut(num_stages)}. If the stages are meant to be alike, {_ALLOW}",
        ranks=[0],
    )
    return None


def same_stages(forms: Sequence[tuple[str, tuple[int, ...]]], stages: int) -> str:
    """The beginning of a sentence about stages that all have these parameters."""
    names = [name for name, _ in forms]
    shown = f"{listed(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
    return f"all {stages} pipeline stages have parameters of the same {len(names)} names and shapes ({shown})"


def _cut(num_stages: int) -> str:
    return f"Cut it before initialize(): model = colonnade.split(model, num_stages={num_stages})"


def _digest_of_values(model: nn.Module) -> int:
    """62 bits that follow from the values that this rank holds; read once, with one wait of the host."""
    parts = [local_part(each) for each in model.parameters() if placement_of(each).tied is None]
    sums = [checksum(part) for part in parts if part.numel()]
    return digest_of(repr(torch.stack(sums).tolist() if sums else []))
