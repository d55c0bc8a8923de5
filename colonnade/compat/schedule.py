"""`colossalai.engine.schedule`: our schedules with its order of arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from colonnade.engine.schedule.non_pipeline import NonPipelineSchedule
from colonnade.engine.schedule.pipeline import PipelineSchedule as _Pipeline

__all__ = ["InterleavedPipelineSchedule", "NonPipelineSchedule", "PipelineSchedule"]

_Process = Callable[..., tuple[Any, Any]] | None


class PipelineSchedule(_Pipeline):
    """1F1B. Whole tensors go between stages, whatever `scatter_gather_tensors` says."""

    def __init__(
        self,
        num_microbatches: int,
        data_process_func: _Process = None,
        tensor_shape: Sequence[int] | None = None,
        scatter_gather_tensors: bool = False,
    ) -> None:
        super().__init__(num_microbatches, "1f1b", None, data_process_func, tensor_shape)


class InterleavedPipelineSchedule(_Pipeline):
    """1F1B over several chunks per rank; `engine.model` is a ModuleList of them."""

    def __init__(
        self,
        num_microbatches: int,
        num_model_chunks: int,
        data_process_func: _Process = None,
        tensor_shape: Sequence[int] | None = None,
        scatter_gather_tensors: bool = False,
    ) -> None:
        super().__init__(num_microbatches, "interleaved_1f1b", num_model_chunks, data_process_func, tensor_shape)
