"""CrossEntropyLoss on logits that are split: along the classes, along the batch, or not at all."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError, PlacementError, listed
from colonnade.nn.layer.arrangement import Arrangement, arrange, gather_output, partition_input
from colonnade.nn.layer.spread import size_of, takes
from colonnade.parallel import collectives, wire
from colonnade.parallel.placement import is_dtensor
from colonnade.parallel.wire import Members, members_of

Reduction = Literal["mean", "sum", "none", "sum_and_count"]


class CrossEntropyLoss(nn.Module):
    """torch.nn.CrossEntropyLoss of the logits of a `Classifier`, classes last, and whole labels.

    Every rank of the tensor group gets the loss of the whole batch. Logits never travel: two small all-reduces of
    some numbers per sample do. Half-precision logits are summed in fp32. `reduction="sum_and_count"` gives (sum,
    number of labels that count), from which the engine makes the mean over all ranks and micro-batches; it knows both of
    a "mean" too.
    """

    layer_kind = "cross_entropy"

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        *,
        arrangement: Arrangement | None = None,
    ) -> None:
        super().__init__()
        if reduction not in get_args(Reduction):
            raise ConfigError(f"reduction={reduction!r}: allowed are {listed(get_args(Reduction))}")
        if not 0.0 <= label_smoothing <= 1.0:
            raise ConfigError(f"label_smoothing={label_smoothing}: a share of the whole, from 0 to 1")
        self.arrangement = arrangement or arrange()
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing

    @classmethod
    def from_module(cls, module: nn.CrossEntropyLoss, *, arrangement: Arrangement | None = None) -> CrossEntropyLoss:
        """The same loss as a torch.nn.CrossEntropyLoss."""
        if module.weight is not None:
            raise ConfigError("class weights are not supported; leave out `weight`")
        reduction: Reduction = module.reduction  # type: ignore[assignment]
        return cls(module.ignore_index, reduction, module.label_smoothing, arrangement=arrangement)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Logits [batch, ..., classes] in the inner spread, labels [batch, ...] whole."""
        context, inner = self.arrangement.context, self.arrangement.inner
        takes(self, self.arrangement, logits, "inner")
        mine = partition_input(labels, sequence=None, hidden=None, side="inner", arrangement=self.arrangement)
        if mine.shape != logits.shape[:-1]:
            raise ConfigError(
                f"labels of shape {tuple(labels.shape)} (here {tuple(mine.shape)}) do not fit logits of shape "
                f"{tuple(logits.shape)} here: labels are whole and have the dimensions of the logits but the last"
            )
        counted = mine != self.ignore_index
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = self._each(exact, mine.masked_fill(~counted, 0), inner.hidden, labels)
        losses = losses.masked_fill(~counted, 0.0)
        if self.reduction == "none":
            return gather_output(losses, sequence=None, hidden=None, side="inner", arrangement=self.arrangement)
        total = losses.sum()
        if inner.batch is not None:
            total = collectives.reduce(total, inner.batch, context=context)
        return self.reduced(total, labels)

    def reduced(self, total: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """What `reduction` asks for, out of the sum of the losses."""
        count = (labels != self.ignore_index).sum()
        if self.reduction == "sum_and_count":
            return total, count
        if self.reduction == "sum":
            return total
        mean = total / count
        mean.sum_and_count = total, count  # type: ignore[attr-defined]  # the engine's mean is over the whole batch
        return mean

    def _each(self, logits: Tensor, labels: Tensor, mode: ParallelMode | None, whole: Tensor) -> Tensor:
        """The loss of every sample here; `whole` are the labels of all."""
        if mode is None or size_of(mode, self.arrangement.context) == 1:
            losses = F.cross_entropy(
                logits.flatten(0, -2), labels.flatten(), reduction="none", label_smoothing=self.label_smoothing
            )
            return losses.view(labels.shape)
        return self._each_split(logits, labels, mode, whole)

    def _each_split(self, logits: Tensor, labels: Tensor, mode: ParallelMode, whole: Tensor) -> Tensor:
        largest, start, classes = self._largest(logits, mode)
        # Of all labels: so every rank of the group raises, or none.
        known = zero_if_known(whole, whole != self.ignore_index, classes)
        shifted = logits - largest.unsqueeze(-1)
        local = labels - start
        inside = (local >= 0) & (local < logits.shape[-1])
        hit = _picked(shifted, local.masked_fill(~inside, 0)).masked_fill(~inside, 0.0)
        sums = [shifted.exp().sum(-1), hit, *([shifted.sum(-1)] if self.label_smoothing else [])]
        found = collectives.reduce(torch.stack(sums, -1), mode, context=self.arrangement.context).unbind(-1)
        partition = found[0].log()
        loss = partition - found[1]
        if self.label_smoothing:
            loss = torch.lerp(loss, partition - found[2] / classes, self.label_smoothing)
        return loss + known

    def _largest(self, logits: Tensor, mode: ParallelMode) -> tuple[Tensor, Tensor, Tensor]:
        """Of every sample the largest logit; the number of my first class; and how many there are.

        Each rank's number of classes travels with the largest logits, so nobody waits for an answer of its own.
        """
        members = members_of(mode, self.arrangement.context)
        assert members is not None
        values = logits.detach()
        width = values.shape[-1]
        mine = values.amax(-1).flatten() if width else values.sum(-1).flatten() - torch.inf
        widths = mine.new_zeros(members.size)
        widths[members.at] = width
        everyone = wire.all_reduce(torch.cat([mine, widths]), members, dist.ReduceOp.MAX)
        largest, widths = everyone[: len(mine)].view(logits.shape[:-1]), everyone[len(mine) :].long()
        return largest, widths[: members.at].sum(), widths.sum()


def zero_if_known(labels: Tensor, counted: Tensor, classes: Tensor) -> Tensor:
    """0, or NaN where a label that counts is no class; where looking costs no wait, that is an error."""
    unknown = counted & ((labels < 0) | (labels >= classes))
    if labels.device.type == "cpu" and not torch.compiler.is_compiling() and unknown.any():
        raise ConfigError(
            f"label {labels[unknown][0].item()} is none of the {classes.item()} classes (0 to {classes.item() - 1}); mark "
            f"labels that do not count with the loss's ignore_index"
        )
    return torch.where(unknown.any(), torch.nan, 0.0)


def _picked(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1) if values.shape[-1] else values.sum(-1)


# --- Cross entropy fused with the classifier: logits exist for a chunk of tokens at a time, and never in fp32 as a whole ---

CHUNK = 2048
"""Tokens whose logits exist at a time, unless told otherwise."""

_HALF_LIFT = 256.0
"""By which gradients of logits are larger in fp16, where the small ones among them would be zero."""


class LinearCrossEntropyLoss(CrossEntropyLoss):
    """`CrossEntropyLoss()(Classifier(...)(hidden), labels)` without the logits of all tokens.

    Takes the activations that the classifier would take, its weight (this rank's rows of it) and whole labels. The forward
    pass makes the logits of `chunk` tokens, their losses and at once the gradients of activations and weight, then
    those of the next; so it costs no product more, and memory does not grow with tokens x vocabulary. The weight's gradient is
    summed in fp32. For whole and for 1d-split vocabularies.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        *,
        chunk: int = CHUNK,
        arrangement: Arrangement | None = None,
    ) -> None:
        super().__init__(ignore_index, reduction, label_smoothing, arrangement=arrangement)
        if reduction == "none":
            raise ConfigError(
                "LinearCrossEntropyLoss(reduction='none'): the gradients are those of the sum; allowed are 'mean', 'sum' and "
                "'sum_and_count'. CrossEntropyLoss on the logits gives every token's loss"
            )
        if chunk < 1:
            raise ConfigError(f"LinearCrossEntropyLoss(chunk={chunk}): a number of tokens, from 1 on")
        if type(self.arrangement).enter is Arrangement.enter:
            raise ConfigError(
                f"LinearCrossEntropyLoss works on whole vocabularies and on those of tensor mode '1d', not under "
                f"{type(self.arrangement).__name__}; there, use CrossEntropyLoss on the logits of the Classifier"
            )
        self.chunk = chunk

    def forward(  # type: ignore[override]
        self, hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Activations [batch, ..., hidden] in the outer spread, the weight [classes, hidden] of a classifier, whole labels."""
        here = self.arrangement
        if is_dtensor(weight):
            raise PlacementError(
                "LinearCrossEntropyLoss takes the weight as the forward pass of a module has it, and this one is a DTensor: at "
                "zero stage 3, give it out of the module that is gathered (`zero.wrap`), and let that have keeps_gathered=True"
            )
        takes(self, here, hidden, "outer")
        entered = here.enter(hidden)
        if labels.shape != entered.shape[:-1] or weight.dim() != 2 or weight.shape[1] != entered.shape[-1]:
            raise PlacementError(
                f"labels of shape {tuple(labels.shape)}, activations of shape {tuple(entered.shape)} and a weight of shape "
                f"{tuple(weight.shape)} do not fit: labels are whole and have the dimensions of the activations but the "
                f"last, which is the second one of the weight"
            )
        mode = here.inner.hidden
        members = None if mode is None else members_of(mode, here.context)
        plan = _LossPlan(self.ignore_index, self.label_smoothing, self.chunk, members, torch.is_grad_enabled())
        total = _summed(entered.flatten(0, -2), weight, bias, labels.flatten(), plan)
        return self.reduced(total, labels)


@dataclass(frozen=True)
class _LossPlan:
    """What one call does beside its tensors."""

    ignore_index: int
    smoothing: float
    chunk: int
    members: Members | None
    """The ranks that hold the other classes; None where this one holds all."""
    differentiates: bool

    def places(self, labels: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of every label, which of this rank's classes it is (below 0: none) and whether it counts; and the number of classes."""
        counted = labels != self.ignore_index
        local, classes = labels, labels.new_full((), width)
        if self.members is not None:
            widths = labels.new_zeros(self.members.size)
            widths[self.members.at] = width
            widths = wire.all_reduce(widths, self.members)
            local, classes = labels - widths[: self.members.at].sum(), widths.sum()
        return local.masked_fill(~counted | (local >= width), -1), counted, classes

    def joined(self, mine: Tensor) -> Tensor:
        """(3, rows): the log of the sum of all exps, the label's logit and the sum of the logits, over all classes."""
        largest, exps, picked, sums = mine
        if self.members is None:
            return torch.stack([largest + exps.log(), picked, sums])
        everyone = wire.all_gather(mine.unsqueeze(0), self.members, 0, (1,) * self.members.size)
        log_sums = (everyone[:, 0] + everyone[:, 1].log()).logsumexp(0)
        return torch.stack([log_sums, everyone[:, 2].sum(0), everyone[:, 3].sum(0)])


@torch.compiler.disable
def _summed(rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, plan: _LossPlan) -> Tensor:
    """The sum of the losses. Compiled code is left for it: it talks to other ranks and has kernels of its own."""
    return _Fused.apply(rows, weight, bias, labels, plan)


class _Fused(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, plan: _LossPlan) -> Tensor:
        kind = rows.device.type
        casts = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if casts else torch.promote_types(rows.dtype, weight.dtype)
        with torch.autocast(kind, enabled=False):
            needed = [plan.differentiates and each for each in ctx.needs_input_grad[:3]]
            total, ctx.lift, gradients = _forward(rows, weight, bias, labels, plan, dtype, needed)
        ctx.dtypes = rows.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:
        # With a dimension of its own it is multiplied in its own precision, not in that of what it scales.
        slope = (slope / ctx.lift).view(1)
        scaled = [
            None if each is None else torch.mul(each, slope, out=torch.empty_like(each, dtype=dtype))
            for each, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None


def _forward(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    plan: _LossPlan,
    dtype: torch.dtype,
    needed: list[bool],
) -> tuple[Tensor, float, tuple[Tensor | None, ...]]:
    """(sum of the losses, by how much the gradients are too large, gradients of rows, weight and bias where needed)"""
    exact = torch.promote_types(dtype, torch.float32)
    matrix, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
    places, counted, classes = plan.places(labels, len(weight))
    share, hit = plan.smoothing / classes.to(exact), 1.0 - plan.smoothing
    lift = _HALF_LIFT if dtype is torch.float16 else 1.0
    slopes = counted.to(exact) * lift
    of_rows = torch.empty_like(rows, dtype=dtype) if needed[0] else None
    of_weight = torch.zeros_like(weight, dtype=exact) if needed[1] else None
    of_bias = torch.zeros_like(bias, dtype=exact) if bias is not None and needed[2] else None
    total = zero_if_known(labels, counted, classes).to(exact)
    statistics, gradient = _kernels(rows.device, dtype)
    for start in range(0, len(rows), plan.chunk):
        part = slice(start, start + plan.chunk)
        x, local = rows[part].to(dtype), places[part]
        logits = x @ matrix.t() if shift is None else torch.addmm(shift, x, matrix.t())
        log_sums, picked, sums = plan.joined(statistics(logits, local, plan.smoothing > 0))
        losses = log_sums - hit * picked - share * sums
        total += losses.masked_fill(~counted[part], 0.0).sum()
        if any(needed):
            slope = gradient(logits, local, log_sums, slopes[part], share, hit)
            if of_rows is not None:
                torch.mm(slope, matrix, out=of_rows[part])
            if of_weight is not None:
                _add_product(of_weight, slope.t(), x)
            if of_bias is not None:
                of_bias += slope.sum(0, dtype=exact)
    return total, lift, (of_rows, of_weight, of_bias)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in the dtype of the total."""
    if left.dtype is total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        total += left @ right


def _kernels(device: torch.device, dtype: torch.dtype) -> Any:
    """(statistics, gradient): of Triton where they can be built, else of torch's functions."""
    if device.type != "cuda" or dtype is torch.float64 or importlib.util.find_spec("triton") is None:
        return _statistics, _gradient
    from colonnade.nn.layer import cross_entropy_kernels as cross_entropy

    return cross_entropy.statistics, cross_entropy.gradient


def _statistics(logits: Tensor, labels: Tensor, sums: bool) -> Tensor:
    """(4, rows): the largest logit, the sum of exp(logit - largest), the label's logit (0: none here), the sum (if asked for)."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if not logits.shape[1]:
        nothing = exact.new_zeros(len(logits))
        return torch.stack([nothing - torch.inf, nothing, nothing, nothing])
    largest = exact.amax(-1)
    picked = exact.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(labels < 0, 0.0)
    # Where every class here is ruled out, by a logit of -inf, there is no largest to take off.
    exps = (exact - largest.masked_fill(largest == -torch.inf, 0.0).unsqueeze(-1)).exp_().sum(-1)
    return torch.stack([largest, exps, picked, exact.sum(-1) if sums else torch.zeros_like(picked)])


def _gradient(logits: Tensor, labels: Tensor, log_sums: Tensor, slopes: Tensor, share: Tensor, hit: float) -> Tensor:
    """slope * (softmax - share - hit at the label) of every row, in the dtype of the logits."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    found = (exact - log_sums.unsqueeze(-1)).exp_().sub_(share)
    if logits.shape[1]:
        at = labels.clamp(min=0).unsqueeze(-1)
        found.scatter_add_(-1, at, (labels >= 0).to(found.dtype).mul_(-hit).unsqueeze(-1))
    return found.mul_(slopes.unsqueeze(-1)).masked_fill_((slopes == 0).unsqueeze(-1), 0.0).to(logits.dtype)
