"""Schedules: how the forward and backward passes of one step run.

A schedule is the class that a config names (`base`, `pipeline`): it splits a batch into micro-batches and runs the passes. An
order is a function in `orders` that makes the table of a pipeline: each rank's list of actions, such as "forward of micro-batch 2
on stage 1" (`actions`). `check`, `replay` and `simulate` work on tables alone, without torch. `executor` runs a table, `programs`
adds its sends and receives, `transfer` carries them out.
"""

from colonnade.engine.schedule.base import BaseSchedule
from colonnade.engine.schedule.pipeline import (
    InterleavedPipelineSchedule,
    NonPipelineSchedule,
    PipelineSchedule,
    TableSchedule,
)

__all__ = ["BaseSchedule", "InterleavedPipelineSchedule", "NonPipelineSchedule", "PipelineSchedule", "TableSchedule"]
