"""Hooks: what happens beside training. Importing this registers the built-in ones."""

from __future__ import annotations

from colonnade.trainer.hooks._base import BaseHook
from colonnade.trainer.hooks._checkpoint_hook import LoadCheckpointHook, SaveCheckpointHook, StopOnSignal
from colonnade.trainer.hooks._file_hook import CsvHook, JsonlHook
from colonnade.trainer.hooks._log_hook import (
    LogByEpochHook,
    LogMemoryByEpochHook,
    LogMetricByEpochHook,
    LogMetricByStepHook,
    LogTimingByEpochHook,
    MemoryHook,
)
from colonnade.trainer.hooks._lr_scheduler_hook import LRSchedulerHook
from colonnade.trainer.hooks._metric_hook import AccuracyHook, LossHook, MetricHook
from colonnade.trainer.hooks._tracker_hook import TensorBoardHook, WandbHook
from colonnade.trainer.hooks._watch_hook import EarlyStopHook, GradientNormHook, ThroughputHook

TensorboardHook = TensorBoardHook
"""The ancestor's name."""

__all__ = [
    "AccuracyHook",
    "BaseHook",
    "CsvHook",
    "EarlyStopHook",
    "GradientNormHook",
    "JsonlHook",
    "LRSchedulerHook",
    "LoadCheckpointHook",
    "LogByEpochHook",
    "LogMemoryByEpochHook",
    "LogMetricByEpochHook",
    "LogMetricByStepHook",
    "LogTimingByEpochHook",
    "LossHook",
    "MemoryHook",
    "MetricHook",
    "SaveCheckpointHook",
    "StopOnSignal",
    "TensorBoardHook",
    "TensorboardHook",
    "ThroughputHook",
    "WandbHook",
]
