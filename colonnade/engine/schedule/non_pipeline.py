"""The schedule without a pipeline: one batch forward, and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from colonnade.engine.schedule.base import BaseSchedule, StepResult
from colonnade.engine.schedule.loss import loss_value, split_loss
from colonnade.errors import ScheduleError
from colonnade.registry import SCHEDULE


@SCHEDULE.register_module
class NonPipelineSchedule(BaseSchedule):
    """Runs the whole model on each batch. A dict of data goes in by keyword, a list or tuple by position."""

    def forward_back_step(
        self,
        engine: Any,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> StepResult:
        data, label = self.load_batch(data_iter)
        with torch.set_grad_enabled(not forward_only):
            output = call_model(engine, data)
            loss = call_criterion(engine.criterion, output, label) if return_loss or not forward_only else None
        if not forward_only:
            engine.backward(loss)
        self.loss_count = split_loss(loss)[1] if loss is not None else None
        kept = loss_value(loss) if return_loss else None
        return (output, label, kept) if return_output_label else (None, None, kept)


def call_model(model: Any, data: Any) -> Any:
    """Pass data the way a person would write it."""
    if isinstance(data, dict):
        return model(**data)
    if isinstance(data, (list, tuple)):
        return model(*data)
    return model(data)


def call_criterion(criterion: Any, output: Any, label: Any) -> Any:
    """The loss: of the output and the label, or of the output alone where there is no label."""
    if criterion is None:
        raise ScheduleError("a loss is asked for, but the engine has no criterion; pass criterion= to initialize")
    outputs = list(output) if isinstance(output, (list, tuple)) else [output]
    if label is None:
        return criterion(*outputs)
    if isinstance(label, dict) and not isinstance(output, dict):
        return criterion(*outputs, **label)
    if isinstance(label, dict):
        return criterion(**output, **label)
    if isinstance(output, dict):
        return criterion(output, label)
    labels = list(label) if isinstance(label, (list, tuple)) else [label]
    return criterion(*outputs, *labels)
