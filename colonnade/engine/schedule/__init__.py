"""Schedules: how one step's forward and backward passes run.

`base` has the base class, `pipeline` the schedules that a config names. A pipeline's order of passes is a table, handled without
torch: `actions` defines it, `orders` makes it, `check`, `replay` and `simulate` walk over it, `programs` adds the transfers.
`executor` runs the result, `split_backward` runs its split backward passes, and `transfer` sends values between stages. `loss`,
`criterion` and `micro_batch` are for every schedule: counts of losses, calls of a criterion, cuts of a batch.
"""

from colonnade.engine.schedule.base import BaseSchedule
from colonnade.engine.schedule.pipeline import (
    InterleavedPipelineSchedule,
    NonPipelineSchedule,
    PipelineSchedule,
    TableSchedule,
)

__all__ = ["BaseSchedule", "InterleavedPipelineSchedule", "NonPipelineSchedule", "PipelineSchedule", "TableSchedule"]
