"""Schedules: how one step's forward and backward passes run.

`base`, `non_pipeline`, `pipeline`: what a config names. `actions`, `orders`, `check`, `replay`, `simulate`: the order
of passes in a pipeline as a table, without torch. `executor`: runs a table. `transfer`: what goes between stages.
"""

from colonnade.engine.schedule.base import BaseSchedule
from colonnade.engine.schedule.pipeline import (
    InterleavedPipelineSchedule,
    NonPipelineSchedule,
    PipelineSchedule,
    TableSchedule,
)

__all__ = ["BaseSchedule", "InterleavedPipelineSchedule", "NonPipelineSchedule", "PipelineSchedule", "TableSchedule"]
