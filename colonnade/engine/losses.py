"""Losses over uneven data: plain means stay plain means, (sum, count) is divided once by the global count."""

from __future__ import annotations

import struct
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.comm.rank_group import RankGroup
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.gradient_handler.sync import GradientSync
from colonnade.engine.precision import LossScaler
from colonnade.engine.schedule.loss import Count, DivisionWatch, LossForm, MeanWatch, count_on, split_loss
from colonnade.errors import GradientError, listed
from colonnade.reduce.synchroniser import Synchroniser
from colonnade.reduce.uneven import USE_ONE_FORM

_NUMBERS = struct.Struct("2d")
_LEAST = 1e-300
"""A count is 0 or above; the bits of a whole number of 8 bytes make a number below."""


class LossBook:
    """Keeps the counts of one step and turns them into the factor that the summed gradients need.

    The gradients are divided by `distinct_data` (and plain means by `accumulation`) when they are made, so
    the factor is distinct_data / global count for sums, and distinct_data x accumulation / number of means
    where ranks have uneven numbers of batches. Ordinary plain means need none, and no collective.
    """

    def __init__(self, context: ParallelContext, accumulation: int) -> None:
        self._context = context
        self._accumulation = accumulation
        self._form = LossForm()
        self._watch = MeanWatch()
        self._divided = DivisionWatch({"gradient_accumulation": accumulation}, ranks=[0])
        # One pass on one rank: its mean is the mean over the batch, whatever it leaves out.
        self._one_mean = accumulation == 1 and context.layout.distinct_data == 1
        self._count: Tensor | float = 0.0
        self._means = 0
        self._totals: Tensor | None = None
        self._carried = False
        # This rank has given counts once: it goes on taking part, or one that gives a mean would be waited for.
        self._joins = False
        self.uneven = False
        """Set while ranks may run out of batches: then even plain means are counted, by all ranks."""
        # Ranks that see the same data report the same count; each reports its share of it.
        self._share = 1.0
        for axis in context.layout.axes:
            if axis.data == "same" and axis.mode is not ParallelMode.PIPELINE:
                self._share /= axis.size

    def read(self, loss: Any) -> tuple[Tensor, Count | None, Count | None]:
        """(tensor to go backward from, its count or None for a mean, what it is a mean over if that is known)."""
        self._joins = self._joins or isinstance(loss, (tuple, list))  # also where its count is none, and refused
        self._divided.look(loss)
        value, count = split_loss(loss)
        if isinstance(loss, Tensor) and (self._one_mean or count is None):
            if not self._one_mean:
                self._watch.look(loss)
            return loss, None, count
        return value, count, count

    def add(self, count: Count | None, *, here: bool = True) -> None:
        """Note one pass; all of a step are plain means, or all are (sum, count).

        `here`: this rank reports it; of the ranks of a pipeline only one does, and all say which form it has.
        """
        self._joins = (
            self._joins or count is not None
        )  # first: what follows may fail, and the others count on this rank
        self._form.keep(count is not None)
        if not here:
            return
        if count is None:
            self._means += 1
        else:
            number = count_on(count, self._context.device)
            # A negative one could hide in the sum of all; inf and nan stay what they are.
            self._count = self._count + torch.where(number < 0, torch.nan, number)

    @property
    def counted(self) -> bool | None:
        """Whether the losses of this step are (sum, count); None before the first."""
        return self._form.counted

    def carry(self, synchroniser: Synchroniser, scaler: LossScaler | None = None) -> None:
        """Before the last pass of a step, whose count is known: let the counts travel with the gradients, if they can.

        `scaler`: that of fp16, by whose `count` sums were divided; it is told the count of the step.
        """
        if self.takes_part:
            self._carried = synchroniser.carry(self._numbers(), lambda totals: self.factor(totals, scaler))

    def set_scale(self, sync: GradientSync, scaler: LossScaler | None = None) -> None:
        """After the last pass: have gradients multiplied by their factor, if they need one. Collective then.

        Counts that could not travel with the gradients are added up by themselves: over the sockets between ranks of one
        host, in a tenth of the time of a collective, or in a collective of their own.
        """
        if not self._carried:
            sync.set_scale(self.factor(self._added(self._numbers(), sync.world), scaler) if self.takes_part else None)

    @property
    def takes_part(self) -> bool:
        """Whether this rank tells the others what its losses of this step count."""
        return self._joins or self.uneven

    def _numbers(self) -> Tensor:
        """What this rank has: (its count, how many means)."""
        device = self._context.device
        return torch.stack([count_on(value, device) for value in (self._count, self._means)]) * self._share

    def _added(self, mine: Tensor, world: RankGroup | None) -> Tensor:
        with self._context.waits.during("adding up the counts of the losses"):
            if world is None:
                dist.all_reduce(mine, group=self._context.get_group(ParallelMode.GLOBAL))
                return mine
            told = [_NUMBERS.unpack(each) for each in world.exchange(_NUMBERS.pack(*mine.tolist()))]
            others = [rank for rank, (count, _) in zip(world.ranks, told, strict=True) if 0 < count < _LEAST]
            if others:  # they sum gradients already, and told the number of their step
                raise GradientError(
                    f"rank {listed(others)} gave a mean, others their loss as (sum, count); {USE_ONE_FORM}", code="C045"
                )
            return torch.tensor(told, dtype=torch.float64, device="cpu").sum(0)

    def factor(self, totals: Tensor, scaler: LossScaler | None = None) -> Tensor:
        """What this step's summed gradients are still multiplied by, from the sums of all ranks' numbers."""
        self._totals = totals
        counted, means = totals.unbind()
        divided = counted if scaler is None else counted / scaler.count
        divisor = torch.where(counted == 0, means / self._accumulation, divided)
        divisor = torch.where((counted > 0) & (means > 0), torch.nan, divisor)
        # With nothing counted anywhere every gradient is zero, and stays it. After a count that is none it is not finite.
        divisor = torch.where(divisor == 0, 1.0, divisor.where(divisor.isfinite(), torch.nan))
        if scaler is not None:
            expected = counted / self._context.layout.distinct_data
            scaler.expect(torch.where(means > 0, scaler.count, expected))
        return self._context.layout.distinct_data / divisor

    def refuse_two_forms(self) -> None:
        """Raise where some ranks gave counts and others means. On a device only those that gave means wait to see it."""
        totals, self._totals = self._totals, None
        if totals is None or (totals.device.type != "cpu" and self._form.counted is not False):
            return
        if bool((totals > 0).all()):
            raise GradientError(
                f"some ranks gave their loss as (sum, count), others as a mean; {USE_ONE_FORM}", code="C045"
            )

    def someone_has(self, batch_here: bool) -> bool:
        """Whether any rank has a batch left. Collective over the world."""
        flag = torch.tensor([float(batch_here)], device=self._context.device)
        with self._context.waits.during("asking who has a batch"):
            dist.all_reduce(flag, group=self._context.get_group(ParallelMode.GLOBAL))
            return bool(flag.item())

    def clear(self) -> None:
        """Start the next step."""
        self._form, self._count, self._means, self._carried = LossForm(), 0.0, 0, False
