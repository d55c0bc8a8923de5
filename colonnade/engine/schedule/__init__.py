"""Schedules: how one step's forward and backward passes run.

A schedule is the class that a config names (`base`, `pipeline`): it cuts a batch and runs the passes of a step. An order is a
function in `orders` that makes the table of a pipeline: which rank runs which pass when, without torch (`actions`, `check`,
`replay`, `simulate`). `executor` runs a table, `programs` adds the transfers to it, `transfer` carries what goes between stages.
"""

from colonnade.engine.schedule.base import BaseSchedule
from colonnade.engine.schedule.pipeline import (
    InterleavedPipelineSchedule,
    NonPipelineSchedule,
    PipelineSchedule,
    TableSchedule,
)

__all__ = ["BaseSchedule", "InterleavedPipelineSchedule", "NonPipelineSchedule", "PipelineSchedule", "TableSchedule"]
