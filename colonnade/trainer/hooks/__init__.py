"""Hooks: what happens beside training. Importing this registers the built-in ones."""

from __future__ import annotations

from colonnade.trainer.hooks.average import EMAHook
from colonnade.trainer.hooks.base import BaseHook
from colonnade.trainer.hooks.checkpoint import LoadCheckpointHook, SaveCheckpointHook
from colonnade.trainer.hooks.log import (
    LogByEpochHook,
    LogMemoryByEpochHook,
    LogMetricByEpochHook,
    LogMetricByStepHook,
    LogTimingByEpochHook,
    MemoryHook,
)
from colonnade.trainer.hooks.look import EvaluateHook, LRFinderHook
from colonnade.trainer.hooks.metrics import (
    AccuracyHook,
    GradientNormHook,
    LossHook,
    LRSchedulerHook,
    MetricHook,
    ThroughputHook,
)
from colonnade.trainer.hooks.profiler import ProfilerHook
from colonnade.trainer.hooks.progress import ProgressHook
from colonnade.trainer.hooks.stop import EarlyStopHook, StopOnSignal
from colonnade.trainer.hooks.trackers import MLflowHook, TensorBoardHook, WandbHook
from colonnade.trainer.hooks.writers import CsvHook, JsonlHook

__all__ = [
    "AccuracyHook",
    "BaseHook",
    "CsvHook",
    "EMAHook",
    "EarlyStopHook",
    "EvaluateHook",
    "GradientNormHook",
    "JsonlHook",
    "LRFinderHook",
    "LRSchedulerHook",
    "LoadCheckpointHook",
    "LogByEpochHook",
    "LogMemoryByEpochHook",
    "LogMetricByEpochHook",
    "LogMetricByStepHook",
    "LogTimingByEpochHook",
    "LossHook",
    "MLflowHook",
    "MemoryHook",
    "MetricHook",
    "ProfilerHook",
    "ProgressHook",
    "SaveCheckpointHook",
    "StopOnSignal",
    "TensorBoardHook",
    "ThroughputHook",
    "WandbHook",
]
