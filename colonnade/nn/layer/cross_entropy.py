"""Cross-entropy on sharded logits (vocabulary-parallel or along the batch), and fused with the classifier; and `Accuracy`."""

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
from colonnade.nn.layer.spread import check_input, size_of
from colonnade.parallel import collectives, wire
from colonnade.parallel.placement import is_dtensor
from colonnade.parallel.wire import Members, members_of

Reduction = Literal["mean", "sum", "none", "sum_and_count"]


class CrossEntropyLoss(nn.Module):
    """torch.nn.CrossEntropyLoss on the sharded logits of a `Classifier` (classes in the last dimension) and full labels.

    Every rank of the tensor group gets the loss of the full batch. Logits are not communicated, only a few numbers per
    sample in two all-reduces. Half-precision logits are summed in fp32.

    Args:
        ignore_index: The label of samples that do not count.
        reduction: As in torch, or "sum_and_count": (sum, number of labels that count), from which the engine computes the
            mean over all ranks and micro-batches. The result of "mean" carries both as `sum_and_count`, for the same use.
        label_smoothing: As in torch.
        arrangement: The sharding scheme; defaults to that of the global context.
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
            raise ConfigError(f"reduction is {reduction!r}; allowed are {listed(get_args(Reduction))}")
        if not 0.0 <= label_smoothing <= 1.0:
            raise ConfigError(f"label_smoothing is {label_smoothing}; it must be from 0 to 1")
        self.arrangement = arrangement or arrange()
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing

    @classmethod
    def from_module(cls, module: nn.CrossEntropyLoss, *, arrangement: Arrangement | None = None) -> CrossEntropyLoss:
        """Make the equivalent of a torch.nn.CrossEntropyLoss without class weights."""
        if module.weight is not None:
            raise ConfigError("class weights are not supported. Leave `weight` out.")
        reduction: Reduction = module.reduction  # type: ignore[assignment]
        return cls(module.ignore_index, reduction, module.label_smoothing, arrangement=arrangement)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the loss of logits [batch, ..., classes] in the inner spread and full labels [batch, ...]."""
        context, inner = self.arrangement.context, self.arrangement.inner
        check_input(self, self.arrangement, logits, "inner")
        local_labels = partition_input(labels, sequence=None, hidden=None, side="inner", arrangement=self.arrangement)
        if local_labels.shape != logits.shape[:-1]:
            raise ConfigError(
                f"labels have shape {tuple(labels.shape)} ({tuple(local_labels.shape)} on this rank), but logits "
                f"have shape {tuple(logits.shape)} on this rank. Pass full labels. Their shape must be the shape of "
                "the logits without the last dimension."
            )
        counted = local_labels != self.ignore_index
        targets = local_labels.masked_fill(~counted, 0)
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if inner.hidden is None or size_of(inner.hidden, context) == 1:
            losses = F.cross_entropy(
                exact.flatten(0, -2), targets.flatten(), reduction="none", label_smoothing=self.label_smoothing
            ).view(targets.shape)
        else:
            losses = self._sharded_losses(exact, targets, inner.hidden, labels)
        losses = losses.masked_fill(~counted, 0.0)
        if self.reduction == "none":
            return gather_output(losses, sequence=None, hidden=None, side="inner", arrangement=self.arrangement)
        total = losses.sum()
        if inner.batch is not None:
            total = collectives.reduce(total, inner.batch, context=context)
        return self.reduced(total, labels)

    def reduced(self, total: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Apply `reduction` to the sum of the losses."""
        count = (labels != self.ignore_index).sum()
        if self.reduction == "sum_and_count":
            return total, count
        if self.reduction == "sum":
            return total
        mean = total / count
        mean.sum_and_count = total, count  # type: ignore[attr-defined]  # for the engine's mean over all ranks
        return mean

    def _sharded_losses(self, logits: Tensor, targets: Tensor, mode: ParallelMode, labels: Tensor) -> Tensor:
        """The loss of every local sample, with the classes sharded over `mode`."""
        members = members_of(mode, self.arrangement.context)
        assert members is not None

        # One all-reduce for the largest logit of every sample, which keeps exp() in range, and for every rank's number of
        # classes, which says where this rank's classes start. No value is read by the host.
        values = logits.detach()
        width = values.shape[-1]
        local_max = values.amax(-1).flatten() if width else values.sum(-1).flatten() - torch.inf
        widths = local_max.new_zeros(members.size)
        widths[members.at] = width
        reduced = wire.all_reduce(torch.cat([local_max, widths]), members, dist.ReduceOp.MAX)
        largest, widths = reduced[: len(local_max)].view(logits.shape[:-1]), reduced[len(local_max) :].long()
        start, classes = widths[: members.at].sum(), widths.sum()

        # The check covers the labels of the full batch, so that all ranks of the group raise, or none.
        known = zero_if_known(labels, labels != self.ignore_index, classes)
        shifted = logits - largest.unsqueeze(-1)
        local = targets - start
        inside = (local >= 0) & (local < width)
        index = local.masked_fill(~inside, 0).unsqueeze(-1)
        hit = (shifted.gather(-1, index).squeeze(-1) if width else shifted.sum(-1)).masked_fill(~inside, 0.0)
        sums = [shifted.exp().sum(-1), hit, *([shifted.sum(-1)] if self.label_smoothing else [])]
        totals = collectives.reduce(torch.stack(sums, -1), mode, context=self.arrangement.context).unbind(-1)
        partition = totals[0].log()
        loss = partition - totals[1]
        if self.label_smoothing:
            loss = torch.lerp(loss, partition - totals[2] / classes, self.label_smoothing)
        return loss + known


def zero_if_known(labels: Tensor, counted: Tensor, classes: Tensor) -> Tensor:
    """Return 0, or NaN if a label that counts is not a class.

    On the CPU, where the check needs no synchronization, an unknown label raises instead.
    """
    unknown = counted & ((labels < 0) | (labels >= classes))
    if labels.device.type == "cpu" and not torch.compiler.is_compiling() and unknown.any():
        raise ConfigError(
            f"label {labels[unknown][0].item()} is not one of the {classes.item()} classes (0 to "
            f"{classes.item() - 1}). Use the loss's ignore_index for labels that do not count."
        )
    return torch.where(unknown.any(), torch.nan, 0.0)


# --- Cross-entropy fused with the classifier: logits exist for one chunk of tokens at a time ---

CHUNK = 2048
"""Default number of tokens whose logits exist at a time."""

_HALF_LIFT = 256.0
"""Scale of the logits' gradients in fp16, in which small ones would underflow."""


class LinearCrossEntropyLoss(CrossEntropyLoss):
    """Fused linear + cross-entropy: `CrossEntropyLoss()(Classifier(...)(hidden), labels)` without the logits of all tokens.

    Takes the input of the classifier, its weight (this rank's rows) and full labels. The forward pass computes the logits of
    `chunk` tokens, their losses and immediately the gradients of activations and weight, then the next chunk: no extra matrix
    product, and memory does not grow with tokens x vocabulary. The weight's gradient is accumulated in fp32. Supports
    replicated vocabularies and those sharded by mode '1d'.
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
                "LinearCrossEntropyLoss does not support reduction='none', because it computes gradients for the sum "
                "of the losses. Allowed are 'mean', 'sum' and 'sum_and_count'. For losses per token use "
                "CrossEntropyLoss on the logits."
            )
        if chunk < 1:
            raise ConfigError(f"LinearCrossEntropyLoss got chunk={chunk}; it must be at least 1 token")
        if type(self.arrangement).enter is Arrangement.enter:
            raise ConfigError(
                "LinearCrossEntropyLoss needs a replicated vocabulary or tensor mode '1d', but the arrangement is "
                f"{type(self.arrangement).__name__}. Use CrossEntropyLoss on the logits of the Classifier."
            )
        self.chunk = chunk

    def forward(  # type: ignore[override]
        self, hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the loss from activations and the weight of a classifier.

        Activations are [batch, ..., hidden] in the outer spread, the weight is this rank's rows of [classes, hidden],
        and labels are full.
        """
        here = self.arrangement
        if is_dtensor(weight):
            raise PlacementError(
                "LinearCrossEntropyLoss got a DTensor as weight, but needs the gathered weight inside a forward "
                "pass. At ZeRO stage 3, return the weight from the module that is gathered (`zero.wrap`). Set "
                "keeps_gathered=True on that module."
            )
        check_input(self, here, hidden, "outer")
        entered = here.enter(hidden)
        if labels.shape != entered.shape[:-1] or weight.dim() != 2 or weight.shape[1] != entered.shape[-1]:
            raise PlacementError(
                f"labels have shape {tuple(labels.shape)}, activations have shape {tuple(entered.shape)}, and the "
                f"weight has shape {tuple(weight.shape)}. The labels must have the shape of the activations without "
                "the last dimension. The last dimension of the activations must equal the second dimension of the "
                "weight. Pass full labels, not a shard."
            )
        mode = here.inner.hidden
        members = None if mode is None else members_of(mode, here.context)
        options = _LossOptions(self.ignore_index, self.label_smoothing, self.chunk, members, torch.is_grad_enabled())
        total = _total(entered.flatten(0, -2), weight, bias, labels.flatten(), options)
        return self.reduced(total, labels)


@dataclass(frozen=True)
class _LossOptions:
    """The arguments of one call that are not tensors."""

    ignore_index: int
    smoothing: float
    chunk: int
    members: Members | None
    """The ranks over which the classes are sharded; None if this rank has all classes."""
    differentiates: bool

    def places(self, labels: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return three tensors that describe the labels.

        These are the index of each label among this rank's classes (negative for classes of other ranks), whether the
        label counts, and the number of all classes.
        """
        counted = labels != self.ignore_index
        local, classes = labels, labels.new_full((), width)
        if self.members is not None:
            widths = labels.new_zeros(self.members.size)
            widths[self.members.at] = width
            widths = wire.all_reduce(widths, self.members)
            local, classes = labels - widths[: self.members.at].sum(), widths.sum()
        return local.masked_fill(~counted | (local >= width), -1), counted, classes

    def joined(self, local: Tensor) -> Tensor:
        """Combine the statistics of each rank's classes to statistics over all classes.

        Returns (3, rows): log-sum-exp, the label's logit and the sum of the logits.
        """
        largest, exps, picked, sums = local
        if self.members is None:
            return torch.stack([largest + exps.log(), picked, sums])
        gathered = wire.all_gather(local.unsqueeze(0), self.members, 0, (1,) * self.members.size)
        log_sums = (gathered[:, 0] + gathered[:, 1].log()).logsumexp(0)
        return torch.stack([log_sums, gathered[:, 2].sum(0), gathered[:, 3].sum(0)])


@torch.compiler.disable
def _total(rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: _LossOptions) -> Tensor:
    """The sum of the losses. Not compiled: it communicates, and has its own kernels."""
    return _Fused.apply(rows, weight, bias, labels, options)


class _Fused(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: _LossOptions
    ) -> Tensor:
        kind = rows.device.type
        casts = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if casts else torch.promote_types(rows.dtype, weight.dtype)
        with torch.autocast(kind, enabled=False):
            needed = [options.differentiates and needs for needs in ctx.needs_input_grad[:3]]
            total, ctx.lift, gradients = _forward(rows, weight, bias, labels, options, dtype, needed)
        ctx.dtypes = rows.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:
        # A tensor of one dimension takes part in type promotion; a scalar tensor would be rounded to the gradient's dtype.
        slope = (slope / ctx.lift).view(1)
        scaled = [
            None if gradient is None else torch.mul(gradient, slope, out=torch.empty_like(gradient, dtype=dtype))
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None


def _forward(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    options: _LossOptions,
    dtype: torch.dtype,
    needed: list[bool],
) -> tuple[Tensor, float, tuple[Tensor | None, ...]]:
    """(sum of the losses, factor by which the gradients are too large, gradients of rows, weight and bias if needed)."""
    exact = torch.promote_types(dtype, torch.float32)
    matrix, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
    places, counted, classes = options.places(labels, len(weight))
    # Label smoothing: every class has this share of the target, and the label `hit` in addition.
    share, hit = options.smoothing / classes.to(exact), 1.0 - options.smoothing
    lift = _HALF_LIFT if dtype is torch.float16 else 1.0
    slopes = counted.to(exact) * lift
    of_rows = torch.empty_like(rows, dtype=dtype) if needed[0] else None
    of_weight = torch.zeros_like(weight, dtype=exact) if needed[1] else None
    of_bias = torch.zeros_like(bias, dtype=exact) if bias is not None and needed[2] else None
    total = zero_if_known(labels, counted, classes).to(exact)
    statistics, gradient = _kernels(rows.device, dtype)
    for start in range(0, len(rows), options.chunk):
        chunk = slice(start, start + options.chunk)
        x, local = rows[chunk].to(dtype), places[chunk]
        logits = x @ matrix.t() if shift is None else torch.addmm(shift, x, matrix.t())
        log_sums, picked, sums = options.joined(statistics(logits, local, options.smoothing > 0))
        losses = log_sums - hit * picked - share * sums
        total += losses.masked_fill(~counted[chunk], 0.0).sum()
        if any(needed):
            slope = gradient(logits, local, log_sums, slopes[chunk], share, hit)
            if of_rows is not None:
                torch.mm(slope, matrix, out=of_rows[chunk])
            if of_weight is not None:
                _add_product(of_weight, slope.t(), x)
            if of_bias is not None:
                of_bias += slope.sum(0, dtype=exact)
    return total, lift, (of_rows, of_weight, of_bias)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in the dtype of the total; on CUDA without rounding the product to half precision first."""
    if left.dtype is total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        total += left @ right


def _kernels(device: torch.device, dtype: torch.dtype) -> Any:
    """(statistics, gradient): Triton kernels if available, else the functions below."""
    if device.type != "cuda" or dtype is torch.float64 or importlib.util.find_spec("triton") is None:
        return _statistics, _gradient
    from colonnade.nn import nn_kernels as cross_entropy

    return cross_entropy.statistics, cross_entropy.gradient


def _statistics(logits: Tensor, labels: Tensor, sums: bool) -> Tensor:
    """(4, rows): the largest logit, the sum of exp(logit - largest), the label's logit or 0, the sum of logits if `sums`."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if not logits.shape[1]:
        zeros = exact.new_zeros(len(logits))
        return torch.stack([zeros - torch.inf, zeros, zeros, zeros])
    largest = exact.amax(-1)
    picked = exact.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(labels < 0, 0.0)
    # If all local logits are -inf, subtracting the largest would give NaN.
    exps = (exact - largest.masked_fill(largest == -torch.inf, 0.0).unsqueeze(-1)).exp_().sum(-1)
    return torch.stack([largest, exps, picked, exact.sum(-1) if sums else torch.zeros_like(picked)])


def _gradient(logits: Tensor, labels: Tensor, log_sums: Tensor, slopes: Tensor, share: Tensor, hit: float) -> Tensor:
    """slope * (softmax - share - hit at the label) for every row, in the dtype of the logits."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    result = (exact - log_sums.unsqueeze(-1)).exp_().sub_(share)
    if logits.shape[1]:
        at = labels.clamp(min=0).unsqueeze(-1)
        result.scatter_add_(-1, at, (labels >= 0).to(result.dtype).mul_(-hit).unsqueeze(-1))
    return result.mul_(slopes.unsqueeze(-1)).masked_fill_((slopes == 0).unsqueeze(-1), 0.0).to(logits.dtype)


class Accuracy(nn.Module):
    """Counts the samples (or tokens) whose label has the largest logit, without labels equal to `ignore_index`."""

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    @torch.no_grad()
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return ((logits.argmax(-1) == labels) & (labels != self.ignore_index)).sum()
