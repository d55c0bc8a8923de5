"""The two forms of a loss: a mean, or (sum, count), which is divided once by the count of all ranks.

Which form a loss has is decided here and nowhere else: `split_loss` reads it, `LossForm` holds a run to it. A mean that
leaves entries out (cross-entropy with `ignore_index`) counts as (sum, count) too: a mean of such means would be wrong
wherever ranks, passes or micro-batches leave out unequally many.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from colonnade.errors import GradientError
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
    """(tensor to go backward from, count or None for a plain mean).

    With `implicit`, a mean that says what it is a mean over counts as (sum, count): one that carries `sum_and_count`, as
    ours does, and one of torch's cross-entropy or NLL loss, whose autograd node knows.
    """
    if isinstance(loss, (tuple, list)):
        if len(loss) != 2 or not isinstance(loss[0], Tensor):
            raise GradientError(
                f"a loss is a scalar tensor (a mean) or (sum, count), not a {type(loss).__name__} of {len(loss)}",
                code="C045",
            )
        return _scalar(loss[0]), _checked_count(loss[1])
    mean = _scalar(loss)
    counted = (_counted_mean(mean) or getattr(mean, "sum_and_count", None)) if implicit else None
    return counted if counted is not None else (mean, None)


def _counted_mean(mean: Tensor) -> tuple[Tensor, Tensor] | None:
    """(sum, count) of a mean that torch's cross-entropy or NLL loss has just made; None for any other."""
    node = _nll_node(mean.grad_fn) if not is_dtensor(mean) else None
    if node is None:
        return None
    weights = node._saved_total_weight
    # Where nothing is counted the mean is NaN, but no gradient comes from it.
    total = torch.where(weights > 0, mean * weights, 0.0)
    return total, weights if node._saved_weight is not None else (~_ignored(node)).sum()


def _nll_node(root: Any) -> Any:
    """The node of the NLL that the loss is a mean of: the loss itself, or what torch's label smoothing mixes in."""
    nll = root
    if root is not None and root.name() == "AddBackward0":
        # (1 - smoothing) * nll + smoothing / classes * (sum over what is not ignored) / count, of one log_softmax
        nll, smooth = _below(root, 0, "Add", "Mul"), _below(root, 1, "Add", "Mul", "Div", "Sum", "MaskedFill")
        if smooth is None or _source(nll) is not _source(smooth):
            return None
    return nll if nll is not None and nll.name() in _NLL and nll._saved_reduction == _MEAN else None


def _below(node: Any, branch: int, *chain: str) -> Any:
    """The node below nodes of these kinds, the first of which is `node` and is left by its `branch`; None if they differ."""
    for kind in chain:
        if node is None or not node.name().startswith(kind):
            return None
        node, branch = node.next_functions[branch][0], 0
    return node


def _source(node: Any) -> Any:
    """The log_softmax that a node comes from, by its first input each time; else where that way ends."""
    while node is not None and node.next_functions and not node.name().startswith("LogSoftmax"):
        ((node, _), *_) = node.next_functions
    return node


def _ignored(node: Any) -> Tensor:
    # The node shows a negative number as an unsigned one.
    return node._saved_target == ctypes.c_int64(node._saved_ignore_index).value


def _leaves_out(node: Any) -> bool:
    """Whether it is a mean whose labels hold ignored entries. Of compiled or recomputed code only what it keeps is seen."""
    if node.name() in _NLL:
        return node._saved_reduction == _MEAN and bool(_ignored(node).any())
    kept = node.saved_tensors if node.name().startswith(("CompiledFunction", "CheckpointFunction")) else ()
    return any(tensor.dtype is torch.int64 and bool((tensor == _IGNORE_INDEX).any()) for tensor in kept)


class MeanWatch:
    """Says once that a loss is a mean of means: it was made out of a cross-entropy that leaves entries out."""

    def __init__(self) -> None:
        self._looks = _LOOKS

    def look(self, mean: Tensor) -> None:
        """Look into the graph near a loss that counts as a plain mean."""
        if self._looks == 0:
            return
        self._looks -= 1
        nodes: list[Any] = [mean.grad_fn]
        for node in islice(nodes, _NODES_SEEN):  # grows meanwhile
            if node is None:
                continue
            if _leaves_out(node):
                self._looks = 0
                get_dist_logger().warning(_MEAN_OF_MEANS)
                return
            nodes += [below for below, _ in node.next_functions]


_MEAN_OF_MEANS = (
    "the loss is made out of a mean cross-entropy whose labels hold ignored entries. Ranks, passes and micro-batches "
    "leave out unequally many, so the mean of their means is not the mean over the whole batch. Give the loss as (sum, "
    "count): (F.cross_entropy(..., reduction='sum') + added * count, count), where count is the number of labels that are "
    "not ignored and added is what you add to the mean (said once)"
)


class DivisionWatch:
    """Says once that a loss is divided by a number by which the engine divides it too.

    `numbers`: these, by key of the config. `ranks`: those that say so; by default all that have such a loss.
    """

    def __init__(self, numbers: Mapping[str, int], ranks: list[int] | None = None) -> None:
        self._keys: dict[float | None, str] = {number: key for key, number in numbers.items() if number > 1}
        self._looks, self._ranks = _LOOKS if self._keys else 0, ranks

    def look(self, loss: Any, rows: Collection[int] = ()) -> None:
        """Look at the last operation that made a loss, or the sum of a loss given as (sum, count).

        `rows`: numbers of rows that were given, by which a mean over them is divided too.
        """
        if self._looks == 0:
            return
        self._looks -= 1
        value = loss[0] if isinstance(loss, (tuple, list)) and loss else loss
        times = _divisor(getattr(value, "grad_fn", None))
        if times in self._keys and times not in rows:
            self._looks = 0
            get_dist_logger().warning(
                f"the loss was divided by {times:g} just before backward, and {self._keys[times]}={times:g} divides it by {times:g} "
                f"again: gradients and losses are then {times:g} times too small. Leave `loss / {times:g}` out; where the number is "
                f"another one by chance, divide before the last operation (said once)",
                ranks=self._ranks,
            )


def _divisor(node: Any) -> float | None:
    """By what number the last operation divided; None where it was no division by one that the host knows."""
    kind = node.name() if node is not None else ""
    other = getattr(node, "_saved_other", None) if kind in ("DivBackward0", "MulBackward0") else None
    if not isinstance(other, Tensor) or other.numel() != 1 or other.device.type != "cpu" or not other:
        return None
    number = float(other)
    return number if kind == "DivBackward0" else round(1.0 / number, 6)


def own_loss(output: Any) -> Any:
    """The loss in the output of a model that makes its own, in either form; None if there is none.

    It is `output["loss"]` or `output.loss`, or the output itself where that is one number, or the first of a tuple.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is not None:
        return found
    if isinstance(output, (tuple, list)) and output and _is_number(output[0]):
        return output if len(output) == 2 and _is_number(output[1]) else output[0]
    return output if _is_number(output) else None


class LossForm:
    """The form of the losses of one run: the first loss decides, and a later one of the other form is an error.

    `implicit`: means that say what they are a mean over count as (sum, count), where counts are allowed.
    """

    def __init__(self, allow_counts: bool = True, implicit: bool = True) -> None:
        self._allow_counts, self._implicit = allow_counts, implicit and allow_counts
        self._watch = MeanWatch()
        self.counted: bool | None = None
        """Whether losses are (sum, count); None while there was none."""

    def read(self, loss: Any) -> tuple[Tensor, Count | None]:
        """`split_loss` of a loss of this run."""
        value, count = split_loss(loss, self._implicit)
        self.keep(count is not None)
        if count is None:
            self._watch.look(value)
        return value, count

    def keep(self, counted: bool) -> None:
        """Hold the run to this form."""
        if counted and not self._allow_counts:
            raise GradientError(
                "a loss given as (sum, count) is known to all ranks: leave out loss_everywhere=False", code="C045"
            )
        if self.counted is not None and self.counted != counted:
            forms = {True: "(sum, count)", False: "a mean"}
            raise GradientError(
                f"the loss was {forms[not counted]} before and is {forms[counted]} now; {USE_ONE_FORM}", code="C045"
            )
        self.counted = counted


def _checked_count(count: Any) -> Count:
    """Refuse what is no count. What lies on a device is not waited for: `LossBook` makes such a step not finite."""
    if isinstance(count, Tensor) and count.numel() == 1:
        # Asked whether it is wrong: to that, a tensor without values answers no.
        if count.device.type != "cpu" or not ((count < 0) | ~count.isfinite()):
            return count
    elif isinstance(count, (int, float)) and math.isfinite(count) and count >= 0:
        return count
    raise GradientError(
        f"the count of a loss given as (sum, count) is a number from 0 on, as an int, a float or a tensor of one element, "
        f"not {count!r}; it is how many samples or tokens the sum is over",
        code="C045",
    )


def count_on(value: Count, device: torch.device) -> Tensor:
    """One number in fp64 on the device, for which the host does not wait: a plain copy from it would, for all work there."""
    if isinstance(value, Tensor):
        number = value.detach().double().reshape(())
        return to_device(number, device) if number.device.type == "cpu" else number
    return torch.full((), float(value), dtype=torch.float64, device=device)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise GradientError(f"a loss is one number, not {found}: return its mean, or (sum, count)", code="C045")
    return loss
