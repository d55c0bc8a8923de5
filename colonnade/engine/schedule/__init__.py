"""Schedules: how one step's forward and backward passes run."""

from colonnade.engine.schedule.base import BaseSchedule
from colonnade.engine.schedule.non_pipeline import NonPipelineSchedule

__all__ = ["BaseSchedule", "NonPipelineSchedule"]
