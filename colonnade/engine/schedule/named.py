"""The pipeline orders as schedules of their own, under the names that a config may use."""

from __future__ import annotations

from typing import Any

from colonnade.engine.schedule.pipeline import PipelineSchedule, TableSource
from colonnade.registry import SCHEDULE


@SCHEDULE.register_module
class GPipe(PipelineSchedule):
    """All forward passes, then all backward passes."""

    def __init__(self, num_microbatches: int, **options: Any) -> None:
        super().__init__(num_microbatches, order="gpipe", **options)


@SCHEDULE.register_module
class OneFOneB(PipelineSchedule):
    """One forward, one backward in turn: as fast as GPipe, with at most p micro-batches in memory."""

    def __init__(self, num_microbatches: int, **options: Any) -> None:
        super().__init__(num_microbatches, order="1f1b", **options)


@SCHEDULE.register_module
class Interleaved1F1B(PipelineSchedule):
    """1F1B with several chunks per rank: the bubble is divided by their number."""

    def __init__(self, num_microbatches: int, num_chunks: int = 2, **options: Any) -> None:
        super().__init__(num_microbatches, order="interleaved_1f1b", num_chunks=num_chunks, **options)


@SCHEDULE.register_module
class InterleavedPipelineSchedule(Interleaved1F1B):
    """Interleaved 1F1B under the name it had in Colossal-AI."""


@SCHEDULE.register_module
class BreadthFirst(PipelineSchedule):
    """GPipe with several chunks per rank."""

    def __init__(self, num_microbatches: int, num_chunks: int = 2, **options: Any) -> None:
        super().__init__(num_microbatches, order="breadth_first", num_chunks=num_chunks, **options)


@SCHEDULE.register_module
class InterleavedZeroBubble(PipelineSchedule):
    """Interleaved 1F1B whose weight gradients fill the waits."""

    def __init__(self, num_microbatches: int, num_chunks: int = 2, **options: Any) -> None:
        super().__init__(num_microbatches, order="interleaved_zero_bubble", num_chunks=num_chunks, **options)


@SCHEDULE.register_module
class ZBV(PipelineSchedule):
    """Zero bubble on a V: two stages per rank, the first and the last on rank 0."""

    def __init__(self, num_microbatches: int, **options: Any) -> None:
        super().__init__(num_microbatches, order="zb_v", num_chunks=2, **options)


@SCHEDULE.register_module
class DualPipeV(PipelineSchedule):
    """DualPipe on a V: two stages per rank, from two micro-batches per rank on."""

    def __init__(self, num_microbatches: int, **options: Any) -> None:
        super().__init__(num_microbatches, order="dualpipe_v", num_chunks=2, **options)


@SCHEDULE.register_module
class TableSchedule(PipelineSchedule):
    """Your own order: a CSV file or rows, one per pipeline rank, checked before it runs."""

    def __init__(self, table: TableSource, num_microbatches: int | None = None, **options: Any) -> None:
        super().__init__(num_microbatches, table=table, **options)
