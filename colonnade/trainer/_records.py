"""Records of steps: the numbers of a step are copied to the host beside training and read one step later."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step was, the same on every rank except `values`, which is what this rank's hooks logged.

    `loss` is the mean over everything that all ranks learnt from, None where no rank has told its loss; `lr` the
    rate the step was made with; `grad_norm` the norm before clipping, None without clipping. `samples` counts the
    rows of all ranks; `weight` is how much this loss counts in a mean over steps.
    """

    step: int
    epoch: int
    loss: float | None
    lr: float | None
    grad_norm: float | None
    samples: int
    seconds: float
    weight: float = 0.0
    values: dict[str, float] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        """Everything that can be plotted, by name."""
        known = {"loss": self.loss, "lr": self.lr, "grad_norm": self.grad_norm}
        seen = {name: value for name, value in known.items() if value is not None}
        return {**seen, "samples": self.samples, "seconds": self.seconds, **self.values}


class HostCopy:
    """Numbers of a device on their way to the host; reading them waits for nothing younger than they are."""

    def __init__(self, values: list[Tensor]) -> None:
        device = next((value.device for value in values if value.device.type != "cpu"), torch.device("cpu"))
        together = torch.stack([value.detach().to(device).reshape(()).double() for value in values])
        self._ready: torch.cuda.Event | None = None
        if together.is_cuda:
            self._values = torch.empty(together.shape, dtype=together.dtype, pin_memory=True)
            self._values.copy_(together, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()
        else:
            self._values = together

    def read(self) -> list[float]:
        if self._ready is not None:
            self._ready.synchronize()
        return [float(value) for value in self._values.tolist()]


@dataclass
class Draft:
    """The numbers of a step on this rank, until they are joined with those of the others."""

    step: int
    epoch: int
    samples: int
    seconds: float
    names: list[str]
    copy: HostCopy | None
    values: dict[str, float]

    def read(self) -> dict[str, float]:
        """Every number by name. The special ones begin with a blank, which no hook's name does."""
        if self.copy is not None:
            self.values.update(zip(self.names, self.copy.read(), strict=True))
            self.copy = None
        return self.values


LOSS, WEIGHT, NORM, LR = " loss", " weight", " norm", " lr"


class RecordBook:
    """Collects the numbers of a step: of its passes, of its end, and of the hooks that are called after it."""

    _samples: int
    _weight: Tensor | float
    _tensors: dict[str, Tensor]
    _values: dict[str, float]
    _end: tuple[int, int, float] | None

    def __init__(self) -> None:
        self.restart()
        self._clear()

    def restart(self) -> None:
        """The time of the next step begins now."""
        self._since = time.perf_counter()

    def add_pass(self, total: Tensor | None, weight: Tensor | float, samples: int) -> None:
        """One batch has been learnt from: the sum of its loss over what it weighs, if this rank has it."""
        self._samples += samples
        if total is not None:
            self._tensors[LOSS] = self._tensors.get(LOSS, 0.0) + total
            self._weight = self._weight + weight

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        """Numbers of hooks."""
        for name, value in values.items():
            if isinstance(value, Tensor):
                self._tensors[name] = value
            else:
                self._values[name] = float(value)

    def end_step(self, step: int, epoch: int, lr: Tensor | float | None, norm: Tensor | None) -> None:
        """The step has been made; hooks may still add to it."""
        now = time.perf_counter()
        self._end = (step, epoch, now - self._since)
        self._since = now
        self.add({name: value for name, value in ((LR, lr), (NORM, norm)) if value is not None})
        self.add({WEIGHT: self._weight})

    def draft(self) -> Draft | None:
        """The step on its way to the host, if one has ended since the last draft; the book is empty after it."""
        if self._end is None:
            return None
        step, epoch, seconds = self._end
        copy = HostCopy(list(self._tensors.values())) if self._tensors else None
        draft = Draft(step, epoch, self._samples, seconds, list(self._tensors), copy, self._values)
        self._clear()
        return draft

    def _clear(self) -> None:
        self._samples, self._weight, self._tensors, self._values, self._end = 0, 0.0, {}, {}, None


def sums_of(draft: Draft | None) -> list[float]:
    """What the ranks add up of a step: loss x weight, weight, samples."""
    if draft is None:
        return [0.0, 0.0, 0.0]
    told = draft.read()
    return [told.get(LOSS, 0.0), told.get(WEIGHT, 0.0), float(draft.samples)]


def finished(draft: Draft, sums: list[float]) -> StepRecord:
    """The record of a step, from this rank's draft and the sums of all."""
    told = draft.read()
    loss, weight, samples = sums
    return StepRecord(
        step=draft.step,
        epoch=draft.epoch,
        loss=loss / weight if weight else None,
        lr=told.get(LR),
        grad_norm=told.get(NORM),
        samples=int(samples),
        seconds=draft.seconds,
        weight=weight,
        values={name: value for name, value in told.items() if not name.startswith(" ")},
    )
