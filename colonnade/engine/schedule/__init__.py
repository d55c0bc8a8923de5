"""Schedules: how one step's forward and backward passes run."""

from colonnade.engine.schedule.base import BaseSchedule
from colonnade.engine.schedule.named import (
    ZBV,
    BreadthFirst,
    DualPipeV,
    GPipe,
    Interleaved1F1B,
    InterleavedPipelineSchedule,
    InterleavedZeroBubble,
    OneFOneB,
    TableSchedule,
)
from colonnade.engine.schedule.non_pipeline import NonPipelineSchedule
from colonnade.engine.schedule.pipeline import PipelineSchedule

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
