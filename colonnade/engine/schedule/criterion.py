"""Calling the criterion: which outputs and labels are its arguments, and helpful errors if it cannot take them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from colonnade.engine.schedule.loss import own_loss
from colonnade.engine.schedule.micro_batch import format_value
from colonnade.engine.schedule.split_backward import StageInput
from colonnade.errors import ScheduleError


def call_criterion(criterion: Any, output: Any, label: Any) -> Any:
    """The loss of an output and its label, or of the output alone if there is no label.

    A list or tuple is passed as several arguments, a dict label by keyword. Without a criterion the loss is the one that
    the model has put into its output.

    Raises:
        ScheduleError: If there is neither a criterion nor a loss in the output, or the arguments do not fit.
    """
    if criterion is None:
        loss = own_loss(output)
        if loss is None:
            raise ScheduleError(
                f"the loss is unknown: the engine has no criterion, and the model returned {format_value(output)}; pass criterion= to "
                f"initialize, or let the model return its loss: a scalar, dict(loss=...) or (loss, ...). A Hugging Face model "
                f"computes it if the batch is a dict with 'labels'",
                code="C045",
            )
        return loss
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return _loss_of(criterion, output, label)

    def with_graph(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.requires_grad:
            return tensor
        tensor = tensor.detach()
        StageInput(tensor)
        return tensor

    # In an evaluation, too, the graph of the loss shows the count that its mean was taken over (see `split_loss`).
    with torch.enable_grad():
        return _loss_of(criterion, tree_map_only(Tensor, with_graph, output), label)


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
                f"{name} takes {needed} arguments, and there is no label: a batch must be (data, label), or a dict with "
                f"'labels'; for other batches pass data_process_func=lambda batch: (data, label) to the schedule",
                code="C045",
            ) from error
    if isinstance(label, dict):
        return criterion(**output, **label) if isinstance(output, dict) else _called(criterion, outputs, [], label)
    labels = list(label) if isinstance(label, (list, tuple)) and not isinstance(output, dict) else [label]
    return _called(criterion, outputs, labels)


def _called(
    criterion: Any, outputs: Sequence[Any], labels: Sequence[Any], named: Mapping[str, Any] | None = None
) -> Any:
    """Call the criterion. If it fails on more values than it requires, the error explains where they come from."""
    named = named or {}
    try:
        return criterion(*outputs, *labels, **named)
    except (TypeError, ValueError, RuntimeError) as error:
        given, takes = len(outputs) + len(labels) + len(named), most_arguments(criterion)
        several = max(len(outputs), len(labels))
        if takes is None or several == 1 or given <= len(required_arguments(criterion)):  # the criterion's own error
            raise
        reason = (
            f"{'the model returned' if len(outputs) > 1 else 'the label is'} {several} values, each a separate argument of the "
            f"criterion (outputs first, then labels). Use a criterion that takes them, such as lambda "
            f"{', '.join([*_names(len(outputs), len(labels)), *named])}: ..., or let the model return one value"
        )
        name = getattr(criterion, "__name__", type(criterion).__name__)
        if isinstance(error, TypeError) and given > takes:
            raise ScheduleError(
                f"{name} takes at most {takes} arguments, and was given {given}: {reason}", code="C045"
            ) from error
        # A value may have been taken for an option, such as the weight of F.cross_entropy.
        if not isinstance(error, torch.OutOfMemoryError):
            error.add_note(f"{name} was given {given} arguments: {reason}")
        raise


def _names(outputs: int, labels: int) -> list[str]:
    """Argument names: output, or output_0 and output_1; then the same for labels."""
    return [
        kind if count == 1 else f"{kind}_{at}"
        for kind, count in (("output", outputs), ("label", labels))
        for at in range(count)
    ]


def required_arguments(function: Any) -> list[str]:
    """The positional arguments without default of a function or module; none if its signature is not known."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return []
    return [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty and parameter.kind <= parameter.POSITIONAL_OR_KEYWORD
    ]


def most_arguments(function: Any) -> int | None:
    """The number of positional arguments of a function or module; None if it is not known or not limited."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return None
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return None
    return sum(kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)
