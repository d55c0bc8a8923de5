"""Schedules: the order and execution of the forward and backward passes of one step.

A schedule is the class that a config names (`schedules`): it splits a batch into micro-batches and runs the passes. An
order is a function in `orders` that makes the table of a pipeline: each rank's list of actions, such as "forward of micro-batch 2
on stage 1" (`actions`). `replay` checks and simulates a table and adds its sends and receives, without torch. `executor` runs a
table, `transfer` carries out the sends and receives.
"""

from colonnade.engine.schedule.schedules import (
    BaseSchedule,
    InterleavedPipelineSchedule,
    NonPipelineSchedule,
    PipelineSchedule,
    TableSchedule,
)

__all__ = ["BaseSchedule", "InterleavedPipelineSchedule", "NonPipelineSchedule", "PipelineSchedule", "TableSchedule"]
