"""The two forms of a loss, a mean or (sum, count), and the call of the criterion. A sum is divided once, by the count of all ranks.

Only this file decides on the form: `split_loss` reads it, and `LossForm` requires the same form of all losses of a run. A mean
that ignores entries (cross-entropy with `ignore_index`) counts as (sum, count), too: if ranks, passes or micro-batches ignore
different numbers of entries, the mean of their means is not the mean over the batch.

`call_criterion` chooses the outputs and labels that are passed to a criterion, and explains the error if they do not fit.
"""

from __future__ import annotations

import ctypes
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from colonnade.engine.schedule.micro_batch import format_value
from colonnade.engine.schedule.split_backward import StageInput
from colonnade.errors import GradientError, ScheduleError
from colonnade.gradients.uneven import USE_ONE_FORM
from colonnade.logging import get_dist_logger
from colonnade.optim.norm import to_device
from colonnade.parallel.placement import is_dtensor

Count = Tensor | int | float

_NLL = ("NllLossBackward0", "NllLoss2DBackward0")
_IGNORE_INDEX = -100  # torch's default
_MEAN = 1  # torch's number for reduction="mean"
_LOOKS = 4  # each may wait for the device
_NODES_SEEN = 32


def split_loss(loss: Any, implicit: bool = True) -> tuple[Tensor, Count | None]:
    """Split a loss into (tensor for the backward pass, count). The count is None for a plain mean.

    With `implicit`, a mean whose count is known is read as (sum, count): a mean with the attribute `sum_and_count`, such as the
    losses of `colonnade.nn`, or a mean of torch's cross-entropy or NLL loss, whose autograd node has the count.

    Raises:
        GradientError: If `loss` has neither form.
    """
    if isinstance(loss, (tuple, list)):
        if len(loss) != 2 or not isinstance(loss[0], Tensor):
            raise GradientError(
                f"a loss must be a scalar tensor (a mean) or (sum, count), but the loss is a {type(loss).__name__} "
                f"of length {len(loss)}",
                code="C045",
            )
        return _scalar(loss[0]), _checked_count(loss[1])
    mean = _scalar(loss)
    counted = (_counted_mean(mean) or getattr(mean, "sum_and_count", None)) if implicit else None
    return counted if counted is not None else (mean, None)


def _counted_mean(mean: Tensor) -> tuple[Tensor, Tensor] | None:
    """(sum, count) of a mean that torch's cross-entropy or NLL loss has just made; None for any other."""
    node: Any = mean.grad_fn
    if node is not None and node.name() == "AddBackward0":
        # Label smoothing: (1 - smoothing) * nll + smoothing / classes * (sum over entries not ignored) / count, both terms
        # of one log_softmax. The count of the NLL is that of the whole loss.
        nll, smooth = _below(node, 0, "Add", "Mul"), _below(node, 1, "Add", "Mul", "Div", "Sum", "MaskedFill")
        node = nll if smooth is not None and _source(nll) is _source(smooth) else None
    if node is None or node.name() not in _NLL or node._saved_reduction != _MEAN or is_dtensor(mean):
        return None
    weights = node._saved_total_weight
    # If nothing is counted the mean is NaN, but no gradient comes from it.
    total = torch.where(weights > 0, mean * weights, 0.0)
    return total, weights if node._saved_weight is not None else (~_ignored(node)).sum()


def _below(node: Any, branch: int, *chain: str) -> Any:
    """Follow a chain of nodes of these kinds, from `node` through its `branch`-th input, and return the node after it; None if
    a kind differs.
    """
    for kind in chain:
        if node is None or not node.name().startswith(kind):
            return None
        node, branch = node.next_functions[branch][0], 0
    return node


def _source(node: Any) -> Any:
    """The log_softmax found by following first inputs, or the last node on that way."""
    while node is not None and node.next_functions and not node.name().startswith("LogSoftmax"):
        ((node, _), *_) = node.next_functions
    return node


def _ignored(node: Any) -> Tensor:
    # The node returns a negative index as an unsigned number.
    return node._saved_target == ctypes.c_int64(node._saved_ignore_index).value


def _leaves_out(node: Any) -> bool:
    """Whether the node is a mean with ignored labels. In compiled or checkpointed code, only saved tensors can be examined."""
    if node.name() in _NLL:
        return node._saved_reduction == _MEAN and bool(_ignored(node).any())
    kept = node.saved_tensors if node.name().startswith(("CompiledFunction", "CheckpointFunction")) else ()
    return any(tensor.dtype is torch.int64 and bool((tensor == _IGNORE_INDEX).any()) for tensor in kept)


class MeanWatch:
    """Warns once if a loss is a mean of means, computed from mean cross-entropies with ignored labels."""

    def __init__(self) -> None:
        self._looks = _LOOKS

    def look(self, mean: Tensor) -> None:
        """Examine the last autograd nodes of a loss that was given as a plain mean."""
        if self._looks == 0:
            return
        self._looks -= 1
        nodes: list[Any] = [mean.grad_fn]
        for node in islice(nodes, _NODES_SEEN):  # breadth first: the list grows meanwhile
            if node is None:
                continue
            if _leaves_out(node):
                self._looks = 0
                get_dist_logger().warning(_MEAN_OF_MEANS)
                return
            nodes += [below for below, _ in node.next_functions]


_MEAN_OF_MEANS = (
    "the loss is computed from a mean cross-entropy with ignored labels. Ranks, passes and micro-batches ignore "
    "different numbers of labels, so the mean of their means is not the mean over the batch. Return the loss as "
    "(sum, count): (F.cross_entropy(..., reduction='sum') + added * count, count). Here count is the number of "
    "labels that are not ignored. If you add a term to the mean, added is this term (logged once)."
)


class DivisionWatch:
    """Warns once if the user divided a loss by a number although the engine divides it by the same number.

    Args:
        numbers: The divisors of the engine, by config key.
        ranks: The ranks that log the warning; default: all ranks that have such a loss.
    """

    def __init__(self, numbers: Mapping[str, int], ranks: list[int] | None = None) -> None:
        self._keys: dict[float | None, str] = {number: key for key, number in numbers.items() if number > 1}
        self._looks, self._ranks = _LOOKS if self._keys else 0, ranks

    def look(self, loss: Any, rows: Collection[int] = ()) -> None:
        """Examine the last autograd operation of a loss, or of the sum in (sum, count).

        `rows`: batch sizes. A division by one of them is a correct mean over rows, and causes no warning.
        """
        if self._looks == 0:
            return
        self._looks -= 1
        value = loss[0] if isinstance(loss, (tuple, list)) and loss else loss
        times = _divisor(getattr(value, "grad_fn", None))
        if times in self._keys and times not in rows:
            self._looks = 0
            get_dist_logger().warning(
                f"the loss was divided by {times:g} just before backward, and {self._keys[times]}={times:g} divides "
                f"it by {times:g} again. Gradients and losses are then {times:g} times too small. Leave `loss / "
                f"{times:g}` out. If the two numbers are equal only by chance, divide before the last operation "
                "(logged once).",
                ranks=self._ranks,
            )


def _divisor(node: Any) -> float | None:
    """The number by which the last operation divided; None for any other operation, and for a number on a device."""
    kind = node.name() if node is not None else ""
    other = getattr(node, "_saved_other", None) if kind in ("DivBackward0", "MulBackward0") else None
    if not isinstance(other, Tensor) or other.numel() != 1 or other.device.type != "cpu" or not other:
        return None
    number = float(other)
    return number if kind == "DivBackward0" else round(1.0 / number, 6)


def own_loss(output: Any) -> Any:
    """The loss in the output of a model that computes its own, in either form; None if there is none.

    The loss is `output["loss"]`, `output.loss`, the output itself if it is one number, or the first item of a tuple.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is not None:
        return found
    if isinstance(output, (tuple, list)) and output and _is_number(output[0]):
        return output if len(output) == 2 and _is_number(output[1]) else output[0]
    return output if _is_number(output) else None


class LossForm:
    """Requires all losses of a run to have the form of the first loss, a mean or (sum, count).

    Raises for a later loss of the other form.

    Args:
        allow_counts: Whether losses may be given as (sum, count).
        implicit: Whether means with a known count are read as (sum, count), if counts are allowed.
    """

    def __init__(self, allow_counts: bool = True, implicit: bool = True) -> None:
        self._allow_counts, self._implicit = allow_counts, implicit and allow_counts
        self._watch = MeanWatch()
        self.counted: bool | None = None
        """Whether losses are (sum, count); None before the first one."""

    def read(self, loss: Any) -> tuple[Tensor, Count | None]:
        """Split a loss (see `split_loss`). Raises GradientError if its form differs from that of earlier losses of the run."""
        value, count = split_loss(loss, self._implicit)
        self.keep(count is not None)
        if count is None:
            self._watch.look(value)
        return value, count

    def keep(self, counted: bool) -> None:
        """Record the form of this loss, a mean or (sum, count). Raises GradientError if earlier losses had the other form."""
        if counted and not self._allow_counts:
            raise GradientError(
                "loss_everywhere=False is not possible with a loss given as (sum, count), because all ranks get its "
                "value. Leave loss_everywhere out.",
                code="C045",
            )
        if self.counted is not None and self.counted != counted:
            forms = {True: "(sum, count)", False: "a mean"}
            raise GradientError(
                f"the loss was {forms[not counted]} before and is {forms[counted]} now. To correct this, "
                f"{USE_ONE_FORM}",
                code="C045",
            )
        self.counted = counted


def _checked_count(count: Any) -> Count:
    """Raise if this is no count. A value on a device is not read: `LossBook` makes a step with a bad one non-finite."""
    if isinstance(count, Tensor) and count.numel() == 1:
        # `not (wrong)` instead of `right`: a fake or meta tensor, which has no value, then passes.
        if count.device.type != "cpu" or not ((count < 0) | ~count.isfinite()):
            return count
    elif isinstance(count, (int, float)) and math.isfinite(count) and count >= 0:
        return count
    raise GradientError(
        f"the count of a loss given as (sum, count) is {count!r}. Pass the number of samples or tokens in the sum, 0 "
        "or larger. Allowed are an int, a float and a tensor of one element.",
        code="C045",
    )


def count_on(value: Count, device: torch.device) -> Tensor:
    """Copy a number to the device in fp64 without blocking the host.

    (A plain copy would block the host until all device work is done.)
    """
    if isinstance(value, Tensor):
        number = value.detach().double().reshape(())
        return to_device(number, device) if number.device.type == "cpu" else number
    return torch.full((), float(value), dtype=torch.float64, device=device)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise GradientError(
            f"a loss must be one number, but the loss is {found}. Return the mean of the loss, or (sum, count).",
            code="C045",
        )
    return loss


def call_criterion(criterion: Any, output: Any, label: Any) -> Any:
    """Compute the loss of an output and its label, or of only the output if there is no label.

    A list or tuple is passed as several arguments, a dict label by keyword. If there is no criterion, the loss in the model's
    output is returned.

    Raises:
        ScheduleError: If there is neither a criterion nor a loss in the output, or the arguments do not fit.
    """
    if criterion is None:
        loss = own_loss(output)
        if loss is None:
            raise ScheduleError(
                f"the loss is unknown, because the engine has no criterion and the model returned {format_value(output)}. Pass criterion= to "
                f"initialize, or let the model return its loss as a scalar, dict(loss=...) or (loss, ...). A Hugging Face model "
                f"computes the loss if the batch is a dict with 'labels'.",
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
                f"{name} takes {needed} arguments, but the batch has no label. Let the data loader return (data, "
                "label), or a dict with 'labels'. For other batches pass data_process_func=lambda batch: (data, "
                "label) to the schedule.",
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
            f"{'the model returned' if len(outputs) > 1 else 'the label is'} {several} values, and each is a "
            "separate argument of the criterion (outputs first, then labels). Let the model return one value, or "
            "use a criterion that takes them all, such as lambda "
            f"{', '.join([*_names(len(outputs), len(labels)), *named])}: ..."
        )
        name = getattr(criterion, "__name__", type(criterion).__name__)
        if isinstance(error, TypeError) and given > takes:
            raise ScheduleError(
                f"{name} takes at most {takes} arguments, but {given} were given: {reason}", code="C045"
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
    """The positional arguments without default of a function or module; an empty list if its signature is not known."""
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
