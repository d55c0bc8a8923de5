"""The hooks of a Trainer. Importing this package registers the built-in ones."""

from __future__ import annotations

from colonnade.trainer.hooks.checkpoint_hooks import EMAHook, LoadCheckpointHook, SaveCheckpointHook
from colonnade.trainer.hooks.hook import BaseHook
from colonnade.trainer.hooks.log import (
    CsvHook,
    JsonlHook,
    LogByEpochHook,
    LogMemoryByEpochHook,
    LogMetricByEpochHook,
    LogMetricByStepHook,
    MemoryHook,
    MLflowHook,
    TensorBoardHook,
    WandbHook,
)
from colonnade.trainer.hooks.metric_hooks import (
    AccuracyHook,
    EvaluateHook,
    GradientNormHook,
    LossHook,
    LRSchedulerHook,
    MetricHook,
    ThroughputHook,
)
from colonnade.trainer.hooks.profiler import ProfilerHook
from colonnade.trainer.hooks.progress import EarlyStopHook, ProgressHook, StopOnSignal

__all__ = [
    "AccuracyHook",
    "BaseHook",
    "CsvHook",
    "EMAHook",
    "EarlyStopHook",
    "EvaluateHook",
    "GradientNormHook",
    "JsonlHook",
    "LRSchedulerHook",
    "LoadCheckpointHook",
    "LogByEpochHook",
    "LogMemoryByEpochHook",
    "LogMetricByEpochHook",
    "LogMetricByStepHook",
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
