"""Records of steps: the numbers of a step are copied to the host asynchronously and read one step later.

`RecordBook` collects the numbers of a step on this rank, `Draft` is that step while it is copied to the host, `StepSums` adds
the numbers of the other ranks, and `StepRecord` is the result, which hooks receive in `on_record`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from colonnade.comm.messages import HostCopy, gather_from_all, is_alone
from colonnade.comm.waits import PhaseClock, PhaseTimes
from colonnade.context.layout import Axis
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.engine import Engine
from colonnade.engine.schedule.loss import Count
from colonnade.engine.schedule.transfer import Meta, build, describe

Weight = tuple[Tensor | None, Tensor | float]
"""(sum of the loss, its count); (None, 0) on a rank without the loss."""


def weigh(loss: Tensor | None, count: Count | None, rows: int) -> Weight:
    """Return the summed loss of a batch, and its weight in a mean over batches: the `count` of the criterion, or the rows.

    A schedule returns means, and a mean of means would be wrong for batches of different sizes.
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
    """The numbers of one optimizer step. All fields are equal on all ranks, except `values` and `times`.

    Attributes:
        loss: mean over the data of all ranks; None if no rank has a loss.
        lr: the learning rate of the step.
        grad_norm: the gradient norm before clipping; None without clipping.
        samples: rows of all ranks.
        tokens: tokens of all ranks; 0 if the batch has none (`count_tokens`).
        weight: weight of this loss in a mean over steps.
        times: seconds of this rank by phase (`colonnade.comm.waits`).
        busy: with several ranks: the largest and the smallest time that a rank computes or loads data, and the rank with the
            largest time, for which the other ranks wait.
        values: numbers that the hooks of this rank logged.
    """

    step: int
    epoch: int
    loss: float | None
    lr: float | None
    grad_norm: float | None
    samples: int
    seconds: float
    weight: float = 0.0
    tokens: int = 0
    clipped: bool = False
    skipped: bool = False
    times: dict[str, float] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        """Return all numbers that can be plotted, by name."""
        known = {"loss": self.loss, "lr": self.lr, "grad_norm": self.grad_norm}
        seen = {name: value for name, value in known.items() if value is not None}
        marks = {name: 1.0 for name in ("clipped", "skipped") if getattr(self, name)}
        times = {f"time/{phase}": seconds for phase, seconds in self.times.items()}
        tokens = {"tokens": self.tokens} if self.tokens else {}
        busy = {f"busy/{name}": value for name, value in self.busy.items()}
        counts = {"samples": self.samples, **tokens, "seconds": self.seconds}
        return {**seen, **counts, **marks, **times, **busy, **self.values}


_TOKENS = (torch.int16, torch.int32, torch.int64)


def count_tokens(batch: Any) -> int:
    """Return the number of elements of the first integer tensor of shape (rows, length) in a nested value; 0 without one."""
    tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    return next((each.numel() for each in tensors if each.dim() == 2 and each.dtype in _TOKENS), 0)


_SLOTS = 64
"""The largest number of sums for the ranks' own times. In a world with more ranks, neighbours share a sum."""


def slots_of(world: int) -> list[range]:
    """Assign the ranks of a world to slots of the all-reduced sums; returns the ranks of each slot.

    In a large world, neighbouring ranks share a slot.
    """
    count = min(world, _SLOTS)
    return [range(-(-slot * world // count), -(-(slot + 1) * world // count)) for slot in range(count)]


_LOSS, _WEIGHT, _NORM, _LR, _DIVISOR = " loss", " weight", " norm", " lr", " divisor"
"""The names of the built-in numbers of a draft. They start with a space, unlike names of hooks."""


class Draft:
    """The numbers of a step on this rank, before the numbers of the other ranks are added.

    Tensors are copied from the device to the host; reading them waits for the copy, but not for later kernels.
    """

    def __init__(
        self,
        place: tuple[int, int, float],
        samples: int,
        tensors: Mapping[str, Tensor],
        values: dict[str, float],
        skipped: HostCopy | None = None,
        times: PhaseTimes | None = None,
        tokens: int = 0,
        slots: Sequence[range] = (),
        rank: int = 0,
    ) -> None:
        self._skipped, self._times, self._tokens, self._slots, self._rank = skipped, times, tokens, slots, rank
        self._place, self._samples, self._names, self._values = place, samples, list(tensors), values
        if tensors:
            device = next((value.device for value in tensors.values() if value.device.type != "cpu"), None)
            numbers = [value.detach().to(device).reshape(()).double() for value in tensors.values()]
            self._copy = HostCopy(torch.stack(numbers))

    def sums(self) -> list[float]:
        """Return the numbers of this rank that are all-reduced.

        These are loss x weight, weight, samples, tokens, and the computing time of each rank in its slot (`slots_of`).
        """
        numbers, times = self._read(), self._times.read() if self._times is not None and self._slots else {}
        # In the other phases a rank also waits for ranks that are late.
        busy = sum(seconds for phase, seconds in times.items() if phase not in ("communication", "other"))
        own = [busy if self._rank in ranks else 0.0 for ranks in self._slots]
        counts = [float(self._samples), float(self._tokens)]
        return [numbers.get(_LOSS, 0.0), numbers.get(_WEIGHT, 0.0), *counts, *own]

    def record(self, sums: list[float]) -> StepRecord:
        """Build the record of the step from the sums over all ranks."""
        numbers = self._read()
        step, epoch, seconds = self._place
        loss, weight, samples, tokens, *own = sums
        busy = [(seconds / len(ranks), ranks[0]) for seconds, ranks in zip(own, self._slots, strict=True)]
        slowest, rank = max(busy, default=(0.0, 0))
        skipped = self._skipped is not None and self._skipped.read() > 0
        return StepRecord(
            step=step,
            epoch=epoch,
            loss=loss / weight if weight else None,
            lr=numbers.get(_LR),
            grad_norm=numbers.get(_NORM),
            samples=int(samples),
            seconds=seconds,
            weight=weight,
            tokens=int(tokens),
            clipped=numbers.get(_DIVISOR, 1.0) > 1.0 and not skipped,
            skipped=skipped,
            times=self._times.read() if self._times is not None else {},
            busy={"slowest": slowest, "fastest": min(busy)[0], "slowest_rank": float(rank)} if slowest else {},
            values={name: value for name, value in numbers.items() if not name.startswith(" ")},
        )

    def _read(self) -> dict[str, float]:
        if self._names:
            self._values.update(zip(self._names, self._copy.read(), strict=True))
            self._names = []
        return self._values


class RecordBook:
    """Collects the numbers of a step: of its batches, of its end, and of the hooks after it.

    Args:
        clock: measures the time of each phase of a step.
        slots: the result of `slots_of`; empty in a world of one rank.
        rank: this rank.
    """

    _samples: int
    _tokens: int
    _weight: Tensor | float
    _tensors: dict[str, Tensor]
    _values: dict[str, float]
    _place: tuple[int, int, float] | None
    _skipped: HostCopy | None
    _times: PhaseTimes | None

    def __init__(self, clock: PhaseClock, slots: Sequence[range] = (), rank: int = 0) -> None:
        self._clock, self._slots, self._rank = clock, slots, rank
        self.restart()
        self._clear()

    def restart(self) -> None:
        """Set the start time of the next step to now."""
        self._since = time.perf_counter()
        self._clock.restart()

    def add_pass(self, total: Tensor | None, weight: Tensor | float, samples: int, tokens: int = 0) -> None:
        """Add a batch: its summed loss (None if this rank has no loss), its weight, and its numbers of samples and tokens."""
        self._samples += samples
        self._tokens += tokens
        if total is not None:
            self._tensors[_LOSS] = self._tensors.get(_LOSS, 0.0) + total
            self._weight = self._weight + weight

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        """Add numbers that hooks log."""
        for name, value in values.items():
            if isinstance(value, Tensor):
                self._tensors[name] = value
            else:
                self._values[name] = float(value)

    def end_step(self, step: int, epoch: int, engine: Engine) -> None:
        """Record the end of an optimizer step; hooks may still add numbers to the step."""
        now = time.perf_counter()
        self._place = (step, epoch, now - self._since)
        self._since = now
        self._times, self._skipped = self._clock.end_step(), engine.last_skip_flag
        known = {
            _LR: next((group.get("lr") for group in engine.optimizer.param_groups), None),
            _NORM: engine.grad_norm,
            _DIVISOR: engine.clip_divisor,
            _WEIGHT: self._weight,
        }
        self.add({name: value for name, value in known.items() if value is not None})

    def draft(self) -> Draft | None:
        """Return the draft of the step that has ended since the last call, and clear the book; None if no step has ended.

        The draft starts copying the numbers to the host.
        """
        if self._place is None:
            return None
        marks = self._skipped, self._times, self._tokens, self._slots, self._rank
        draft = Draft(self._place, self._samples, self._tensors, self._values, *marks)
        self._clear()
        return draft

    def _clear(self) -> None:
        self._samples, self._weight, self._tensors, self._values, self._place = 0, 0.0, {}, {}, None
        self._skipped, self._times, self._tokens = None, None, 0


# --- Communication between ranks besides training ---


def is_first_with_data(context: ParallelContext, rows: bool = False) -> bool:
    """Return whether this rank is the first of the ranks that see the same data.

    With `rows`, it is compared with all ranks that see the same rows: on all pipeline stages, and with all parts of a
    sequence.
    """
    layout = context.layout
    here = layout.coordinates(context.get_global_rank())

    def is_same(axis: Axis) -> bool:
        if rows:
            return axis not in layout.sample_axes
        return axis.data == "same" and axis.mode is not ParallelMode.PIPELINE

    return all(here[axis.name] == 0 for axis in layout.axes if is_same(axis))


class Exchange:
    """All-reduces a few numbers on the host over the world, without a device synchronization. Collective over the world."""

    def __init__(self, context: ParallelContext) -> None:
        self._group = None
        self._waits = context.waits
        if not is_alone(context):
            # A gloo group communicates on the host; the world group is reused if it has this backend.
            world = context.get_group(ParallelMode.GLOBAL)
            is_gloo = dist.get_backend(world) == "gloo"
            self._group = world if is_gloo else context.get_second_group(ParallelMode.GLOBAL, "gloo")

    def start(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Start the all-reduce; the returned function waits for the sums.

        All ranks of the world must call in the same order.
        """
        if self._group is None:
            return lambda: list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        work = dist.all_reduce(values, group=self._group, async_op=True)

        def sums() -> list[float]:
            with self._waits.during("waiting for other ranks, between steps"):
                work.wait()
            return [float(value) for value in values.tolist()]

        return sums

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums over all ranks. Collective over the world."""
        return self.start(numbers)()


class StepSums:
    """The single all-reduce between two steps: flags of all ranks, together with the numbers of an earlier step.

    `start` starts it and `finish` waits for it; a checkpoint in between may `wait` earlier. All ranks call these
    methods in the same order. The numbers of a step are sent `lag` steps after `add` has queued them, so that reading
    them does not synchronize the device. Each complete record is passed to `deliver`. `count` is the number of sums of
    a step (`Draft.sums`), which a rank without a step sends as zeros.
    """

    def __init__(self, exchange: Exchange, lag: int, deliver: Callable[[StepRecord], None], count: int = 4) -> None:
        self._exchange, self._lag, self._deliver, self._count = exchange, lag, deliver, count
        self._queue: deque[Draft] = deque()
        self._begun: tuple[Draft | None, Callable[[], list[float]]] | None = None
        self._flags: list[float] = []

    def add(self, draft: Draft | None) -> None:
        """Queue the numbers of a step; does nothing if `draft` is None."""
        if draft is not None:
            self._queue.append(draft)

    def start(self, flags: Sequence[bool]) -> None:
        """Start the all-reduce of the flags. Collective over the world; does not block."""
        draft = self._queue.popleft() if len(self._queue) > self._lag else None
        numbers = draft.sums() if draft is not None else [0.0] * self._count
        self._begun = draft, self._exchange.start([*map(float, flags), *numbers])

    def wait(self) -> None:
        """Wait for an all-reduce in progress, and deliver its record."""
        if self._begun is not None:
            (draft, sums), self._begun = self._begun, None
            found = sums()
            self._flags, numbers = found[: -self._count], found[-self._count :]
            if draft is not None:
                self._deliver(draft.record(numbers))

    def finish(self) -> list[float]:
        """Wait for the all-reduce, and return the sums of its flags."""
        self.wait()
        return self._flags

    def drain(self) -> None:
        """Deliver the records of all queued steps now. Collective over the world."""
        while self._queue:
            draft = self._queue.popleft()
            self._deliver(draft.record(self._exchange.sum(draft.sums())))


def sum_over_world(values: Tensor, context: ParallelContext) -> Tensor:
    """All-reduce a device tensor in place. Collective over the world."""
    if not is_alone(context):
        dist.all_reduce(values, group=context.get_group(ParallelMode.GLOBAL))
    return values


def gather_values(value: Any, has: bool, context: ParallelContext) -> list[Any]:
    """Return the nested tensors of all ranks with `has`, in rank order, on the host of every rank.

    Collective over the world.
    """
    note, tensors = describe(value, "what is gathered") if has else ("", [])
    if is_alone(context):
        return [value] if has else []
    found = []
    for rank, text in enumerate(gather_from_all(note, context)):
        if text:
            local = iter(tensors) if rank == context.get_global_rank() else None
            found.append(build(text, partial(_broadcast_tensor, rank, local, context)))
    return found


def _broadcast_tensor(rank: int, local: Iterator[Tensor] | None, context: ParallelContext, meta: Meta) -> Tensor:
    """The next tensor of `rank` on every rank; sent as bytes, since backends have no collectives for some dtypes."""
    group = context.get_group(ParallelMode.GLOBAL)
    where = context.device if dist.get_backend(group) == "nccl" else torch.device("cpu")
    if local is not None:
        value = next(local).detach().to(where).contiguous()
    else:
        value = torch.empty(meta.shape, dtype=meta.dtype, device=where)
    if value.numel():
        dist.broadcast(value.reshape(-1).view(torch.uint8), rank, group=group)
    return value.cpu()
