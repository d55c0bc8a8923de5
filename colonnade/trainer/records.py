"""Records of steps: the numbers of a step are copied to the host beside training and read one step later."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.comm.host_copy import HostCopy
from colonnade.comm.messages import gather_from_all, is_alone
from colonnade.comm.waits import PhaseClock, PhaseTimes
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.engine import Engine
from colonnade.engine.schedule.loss import Count
from colonnade.engine.schedule.transfer import Meta, build, describe

Weight = tuple[Tensor | None, Tensor | float]
"""(sum of the loss, what it is a sum over); (None, 0) where this rank does not know the loss."""


def weigh(loss: Tensor | None, count: Count | None, rows: int) -> Weight:
    """The weight of a batch in a mean over batches: the `count` of its criterion, or its rows.

    A schedule returns means: without counts there would be means of means.
    """
    if loss is None:
        return None, 0.0
    if count is None:
        weight: Tensor | float = float(rows or 1)
    else:
        weight = torch.as_tensor(count, dtype=torch.float64, device=loss.device).detach()
    value = loss.detach().double().reshape(()) * weight
    return (torch.where(weight > 0, value, 0.0) if isinstance(weight, Tensor) else value), weight  # 0 / 0: NaN


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step was, the same on every rank except `values`, which is what this rank's hooks logged.

    `loss` is the mean over everything that all ranks learnt from, None where no rank has told its loss; `lr` the
    rate the step was made with; `grad_norm` the norm before clipping, None without clipping. `samples` counts the
    rows of all ranks; `weight` is how much this loss counts in a mean over steps. `times` says where the time of the
    step went on this rank, in seconds by phase (`colonnade.comm.waits`).
    """

    step: int
    epoch: int
    loss: float | None
    lr: float | None
    grad_norm: float | None
    samples: int
    seconds: float
    weight: float = 0.0
    clipped: bool = False
    skipped: bool = False
    times: dict[str, float] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        """Everything that can be plotted, by name."""
        known = {"loss": self.loss, "lr": self.lr, "grad_norm": self.grad_norm}
        seen = {name: value for name, value in known.items() if value is not None}
        marks = {name: 1.0 for name in ("clipped", "skipped") if getattr(self, name)}
        times = {f"time/{phase}": seconds for phase, seconds in self.times.items()}
        return {**seen, "samples": self.samples, "seconds": self.seconds, **marks, **times, **self.values}


_LOSS, _WEIGHT, _NORM, _LR, _DIVISOR = " loss", " weight", " norm", " lr", " divisor"
"""The names of a draft's own numbers. They begin with a blank, which no hook's name does."""


class Draft:
    """The numbers of a step on this rank, until they are joined with those of the others.

    Tensors of a device are copied to the host; reading them waits for nothing younger than they are.
    """

    def __init__(
        self,
        place: tuple[int, int, float],
        samples: int,
        tensors: Mapping[str, Tensor],
        values: dict[str, float],
        skipped: HostCopy | None = None,
        times: PhaseTimes | None = None,
    ) -> None:
        self._skipped, self._times = skipped, times
        self._place, self._samples, self._names, self._values = place, samples, list(tensors), values
        if tensors:
            device = next((value.device for value in tensors.values() if value.device.type != "cpu"), None)
            numbers = [value.detach().to(device).reshape(()).double() for value in tensors.values()]
            self._copy = HostCopy(torch.stack(numbers))

    def sums(self) -> list[float]:
        """What the ranks add up of a step: loss x weight, weight, samples."""
        told = self._read()
        return [told.get(_LOSS, 0.0), told.get(_WEIGHT, 0.0), float(self._samples)]

    def record(self, sums: list[float]) -> StepRecord:
        """The record of the step, given the sums over all ranks."""
        told = self._read()
        step, epoch, seconds = self._place
        loss, weight, samples = sums
        skipped = self._skipped is not None and self._skipped.read() > 0
        return StepRecord(
            step=step,
            epoch=epoch,
            loss=loss / weight if weight else None,
            lr=told.get(_LR),
            grad_norm=told.get(_NORM),
            samples=int(samples),
            seconds=seconds,
            weight=weight,
            clipped=told.get(_DIVISOR, 1.0) > 1.0 and not skipped,
            skipped=skipped,
            times=self._times.read() if self._times is not None else {},
            values={name: value for name, value in told.items() if not name.startswith(" ")},
        )

    def _read(self) -> dict[str, float]:
        if self._names:
            self._values.update(zip(self._names, self._copy.read(), strict=True))
            self._names = []
        return self._values


class RecordBook:
    """Collects the numbers of a step: of its passes, of its end, and of the hooks that are called after it."""

    _samples: int
    _weight: Tensor | float
    _tensors: dict[str, Tensor]
    _values: dict[str, float]
    _place: tuple[int, int, float] | None
    _skipped: HostCopy | None
    _times: PhaseTimes | None

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self.restart()
        self._clear()

    def restart(self) -> None:
        """The time of the next step begins now."""
        self._since = time.perf_counter()
        self._clock.restart()

    def add_pass(self, total: Tensor | None, weight: Tensor | float, samples: int) -> None:
        """One batch has been learnt from: the sum of its loss over what it weighs, if this rank has it."""
        self._samples += samples
        if total is not None:
            self._tensors[_LOSS] = self._tensors.get(_LOSS, 0.0) + total
            self._weight = self._weight + weight

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        """Numbers of hooks."""
        for name, value in values.items():
            if isinstance(value, Tensor):
                self._tensors[name] = value
            else:
                self._values[name] = float(value)

    def end_step(self, step: int, epoch: int, engine: Engine) -> None:
        """The engine has made a step; hooks may still add to it."""
        now = time.perf_counter()
        self._place = (step, epoch, now - self._since)
        self._since = now
        self._times, self._skipped = self._clock.end_step(), engine.last_skip_flag
        told = {
            _LR: next((group.get("lr") for group in engine.optimizer.param_groups), None),
            _NORM: engine.grad_norm,
            _DIVISOR: engine.clip_divisor,
            _WEIGHT: self._weight,
        }
        self.add({name: value for name, value in told.items() if value is not None})

    def draft(self) -> Draft | None:
        """The step on its way to the host, if one has ended since the last draft; the book is empty after it."""
        if self._place is None:
            return None
        draft = Draft(self._place, self._samples, self._tensors, self._values, self._skipped, self._times)
        self._clear()
        return draft

    def _clear(self) -> None:
        self._samples, self._weight, self._tensors, self._values, self._place = 0, 0.0, {}, {}, None
        self._skipped, self._times = None, None


# --------------------------------------------------------------------------------------------------
# What the ranks tell each other beside training: sums of a few numbers, and whole values of those that have them.
# --------------------------------------------------------------------------------------------------


def speaks(context: ParallelContext, pipeline: bool = False) -> bool:
    """Whether this rank is the first of those that see the same data; with `pipeline`, of all stages too."""
    here = context.layout.coordinates(context.get_global_rank())
    return all(
        here[axis.name] == 0
        for axis in context.layout.axes
        if axis.data == "same" and (pipeline or axis.mode is not ParallelMode.PIPELINE)
    )


class Exchange:
    """Adds up a few numbers of the host over the world, without waiting for a device. Collective to make and to use."""

    def __init__(self, context: ParallelContext) -> None:
        self._group = None if is_alone(context) else _host_group(context)
        self._waits = context.waits

    def start(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Begin to add up; what it returns waits for the sums over all ranks. Collective, in the same order on all."""
        if self._group is None:
            return lambda: list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        work = dist.all_reduce(values, group=self._group, async_op=True)

        def sums() -> list[float]:
            with self._waits.during("waiting for the others beside the steps"):
                work.wait()
            return [float(value) for value in values.tolist()]

        return sums

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """The sums over all ranks. Collective."""
        return self.start(numbers)()


def sum_over_world(values: Tensor, context: ParallelContext) -> Tensor:
    """The sums of a device tensor over all ranks. Collective."""
    if not is_alone(context):
        dist.all_reduce(values, group=context.get_group(ParallelMode.GLOBAL))
    return values


def gather_values(value: Any, has: bool, context: ParallelContext) -> list[Any]:
    """The nested values of tensors of all ranks that have one, in rank order, on the host of every rank. Collective."""
    note, tensors = describe(value, "what is gathered") if has else ("", [])
    if is_alone(context):
        return [value] if has else []
    found = []
    for rank, text in enumerate(gather_from_all(note, context)):
        if text:
            mine = iter(tensors) if rank == context.get_global_rank() else None
            found.append(build(text, partial(_shared, rank, mine, context)))
    return found


def _shared(rank: int, mine: Iterator[Tensor] | None, context: ParallelContext, meta: Meta) -> Tensor:
    """A tensor of `rank`, as bytes: so every type can travel."""
    group = context.get_group(ParallelMode.GLOBAL)
    where = context.device if dist.get_backend(group) == "nccl" else torch.device("cpu")
    if mine is not None:
        value = next(mine).detach().to(where).contiguous()
    else:
        value = torch.empty(meta.shape, dtype=meta.dtype, device=where)
    if value.numel():
        dist.broadcast(value.reshape(-1).view(torch.uint8), rank, group=group)
    return value.cpu()


def _host_group(context: ParallelContext) -> Any:
    """A group whose collectives run on the host: the world's own where that is gloo."""
    world = context.get_group(ParallelMode.GLOBAL)
    return world if dist.get_backend(world) == "gloo" else context.get_second_group(ParallelMode.GLOBAL, "gloo")
