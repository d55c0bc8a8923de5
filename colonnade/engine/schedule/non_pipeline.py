"""The schedule without a pipeline: one batch forward, and backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from colonnade.engine.schedule.base import BaseSchedule, StepResult, most_arguments, required_arguments
from colonnade.engine.schedule.executor.backward import StageInput
from colonnade.engine.schedule.executor.call import format_value
from colonnade.engine.schedule.loss import own_loss, split_loss
from colonnade.errors import ScheduleError
from colonnade.parallel.split import call_layer
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
        if label is None and engine.criterion is None and isinstance(data, dict):
            label = data.get("labels")  # a model that makes its own loss takes them; hooks may want to see them
        with torch.set_grad_enabled(not forward_only):
            output = call_layer(engine, data)
            loss = call_criterion(engine.criterion, output, label) if return_loss or not forward_only else None
        if not forward_only:
            engine.backward(loss)
        elif loss is not None:
            self.loss_count = split_loss(loss)[1]
        mean = None
        if loss is not None and return_loss:
            mean = (loss[0] / loss[1] if isinstance(loss, (tuple, list)) else loss).detach()
        return (output, label, mean) if return_output_label else (None, None, mean)


def call_criterion(criterion: Any, output: Any, label: Any) -> Any:
    """The loss: of the output and the label, or of the output alone where there is no label.

    Without a criterion it is the loss that the model has put into its output.
    """
    if criterion is None:
        loss = own_loss(output)
        if loss is None:
            raise ScheduleError(
                f"a loss is asked for, but the engine has no criterion, and the model returned {format_value(output)}; pass "
                f"criterion= to initialize, or let the model return its loss: a scalar, dict(loss=...) or (loss, ...). A model of "
                f"transformers makes it where the batch is a dict with 'labels'",
                code="C045",
            )
        return loss
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return _loss_of(criterion, output, label)
    with torch.enable_grad():  # of an evaluation too, the graph of the loss says what it is a mean over
        return _loss_of(criterion, tree_map_only(Tensor, _with_graph, output), label)


def _loss_of(criterion: Any, output: Any, label: Any) -> Any:
    outputs = list(output) if isinstance(output, (list, tuple)) else [output]
    if label is None:
        try:
            return _called(criterion, outputs, [])
        except TypeError as error:
            if len(outputs) >= (needed := len(required_arguments(criterion))):
                raise
            name = getattr(criterion, "__name__", type(criterion).__name__)
            raise ScheduleError(
                f"{name} takes {needed} arguments, and there is no label: a batch is (data, label), or a dict with "
                f"'labels'; for others pass data_process_func=lambda batch: (data, label) to the schedule",
                code="C045",
            ) from error
    if isinstance(label, dict):
        return criterion(**output, **label) if isinstance(output, dict) else _called(criterion, outputs, [], label)
    labels = list(label) if isinstance(label, (list, tuple)) and not isinstance(output, dict) else [label]
    return _called(criterion, outputs, labels)


def _called(
    criterion: Any, outputs: Sequence[Any], labels: Sequence[Any], named: Mapping[str, Any] | None = None
) -> Any:
    """The criterion of these; where it fails on more values than it needs, the error says where they are from."""
    named = named or {}
    try:
        return criterion(*outputs, *labels, **named)
    except (TypeError, ValueError, RuntimeError) as error:
        given, takes = len(outputs) + len(labels) + len(named), most_arguments(criterion)
        several = max(len(outputs), len(labels))
        if takes is None or several == 1 or given <= len(required_arguments(criterion)):  # an error inside
            raise
        told = (
            f"{'the model returned' if len(outputs) > 1 else 'the label is'} {several} values, which go into the criterion one "
            f"by one (outputs first, then labels). Give a criterion that takes them, such as lambda "
            f"{', '.join([*_names(len(outputs), len(labels)), *named])}: ..., or let the model return one value"
        )
        name = getattr(criterion, "__name__", type(criterion).__name__)
        if isinstance(error, TypeError) and given > takes:
            raise ScheduleError(
                f"{name} takes at most {takes} arguments, and was given {given}: {told}", code="C045"
            ) from error
        if not isinstance(
            error, torch.OutOfMemoryError
        ):  # one of them is taken for an option, as the weight of F.cross_entropy
            error.add_note(f"{name} was given {given} arguments: {told}")
        raise


def _with_graph(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or tensor.requires_grad:
        return tensor
    tensor = tensor.detach()
    StageInput(tensor)
    return tensor


def _names(outputs: int, labels: int) -> list[str]:
    """Names for so many arguments: output, or output_0 and output_1; then labels."""
    return [
        kind if count == 1 else f"{kind}_{at}"
        for kind, count in (("output", outputs), ("label", labels))
        for at in range(count)
    ]
