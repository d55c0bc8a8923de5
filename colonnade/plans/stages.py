"""Pipeline stages by the model's own forward pass."""

from __future__ import annotations

from typing import Any

from torch import nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError
from colonnade.parallel.schedules import build_schedule
from colonnade.parallel.split import Split, split


def make_stages(model: nn.Module, context: ParallelContext, sample: Any = None) -> Split:
    """The model as stages, as many as the schedule of the config has. `sample`: as of `colonnade.split`."""
    schedule = build_schedule(context)
    if not hasattr(schedule, "stage_ranks"):
        raise ConfigError(
            f"{type(schedule).__name__} runs no pipeline, and the config has parallel.pipeline={context.pipeline_parallel_size}; "
            f"choose one, as in schedule=dict(type='OneFOneB', num_microbatches=8)"
        )
    return split(model, num_stages=len(schedule.stage_ranks(context.pipeline_parallel_size)), sample=sample)
