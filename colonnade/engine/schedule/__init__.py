"""Schedules: how one step's forward and backward passes run.

`base`, `non_pipeline`, `pipeline`: what a config names. `actions`, `orders`, `check`, `replay`, `simulate`: the order
of passes in a pipeline as a table, without torch. `executor`: runs a table. `transfer`: what goes between stages.
"""

from colonnade.engine.schedule.base import BaseSchedule
from colonnade.engine.schedule.non_pipeline import NonPipelineSchedule
from colonnade.engine.schedule.pipeline import (
    ZBV,
    BreadthFirst,
    DualPipeV,
    GPipe,
    Interleaved1F1B,
    InterleavedPipelineSchedule,
    InterleavedZeroBubble,
    OneFOneB,
    PipelineSchedule,
    TableSchedule,
)

__all__ = [
    "ZBV",
    "BaseSchedule",
    "BreadthFirst",
    "DualPipeV",
    "GPipe",
    "Interleaved1F1B",
    "InterleavedPipelineSchedule",
    "InterleavedZeroBubble",
    "NonPipelineSchedule",
    "OneFOneB",
    "PipelineSchedule",
    "TableSchedule",
]
