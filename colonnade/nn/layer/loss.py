"""CrossEntropyLoss on logits that are split: along the classes, along the batch, or not at all."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError, listed
from colonnade.nn.layer.arrangement import Arrangement, arrange, gather_output, partition_input
from colonnade.nn.layer.first_pass import takes
from colonnade.nn.layer.spread import size_of
from colonnade.parallel import collectives
from colonnade.parallel.collectives import members_of, wire

Reduction = Literal["mean", "sum", "none", "sum_and_count"]


class CrossEntropyLoss(nn.Module):
    """torch.nn.CrossEntropyLoss of the logits of a `Classifier`, classes last, and whole labels.

    Every rank of the tensor group gets the loss of the whole batch. Logits never travel: two small all-reduces of
    some numbers per sample do. Half-precision logits are summed in fp32. `reduction="sum_and_count"` gives (sum,
    number of labels that count), from which the engine makes the mean over all ranks and micro-batches; it knows both of
    a "mean" too.
    """

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
