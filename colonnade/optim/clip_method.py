"""Clip methods: from reduced norms to a divisor per slot, and for some methods a flag that skips the step.

A method sees only numbers that have the same bits on every rank, and keeps its history in device tensors that it changes in
place. So all ranks decide alike, nothing waits for the device, and a CUDA graph can contain the step. The gradient is divided
by divisor = max(1, (norm + 1e-6) / limit), the inverse of torch's clip coefficient.

The base class comes first, then the fixed limit (`norm`), then the methods that learn their limit from past norms: `zclip`,
`percentile`, `skip_on_spike` and `adagc`. A new method is a class registered in `CLIP_METHOD`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from colonnade.config.settings import positive
from colonnade.errors import CheckpointError, ConfigError
from colonnade.optim.norm import Norms
from colonnade.registry import Registry

CLIP_METHOD = Registry("clip method")

EPSILON = 1e-6
"""Added to the norm, as torch does; once for the whole norm."""


def divisor_to(norm: Tensor, limit: Tensor | float) -> Tensor:
    """The divisor that brings a gradient of this norm down to `limit`; 1 if `limit` is inf."""
    if isinstance(limit, float) and math.isinf(limit):
        return torch.ones_like(norm)
    return ((norm + EPSILON) / limit).clamp(min=1.0)


class Measured:
    """The input of a method: the total norm, the norm of every slot, and whether all gradients are finite (0-dim).

    `per_slot`: every slot is clipped by its own norm.
    """

    def __init__(self, norm: Tensor, norms: Norms, bad: Tensor, per_slot: bool = False) -> None:
        self.norm, self.per_slot = norm, per_slot
        self._norms = norms
        self._bad = bad

    @cached_property
    def slots(self) -> Tensor:
        """The norm of every slot."""
        return self._norms.per_slot()

    @property
    def clipped_by(self) -> Tensor:
        """The norm that is limited: the total norm, or with `per="layer"` and `per="parameter"` the norm of every slot."""
        return self.slots if self.per_slot else self.norm

    @property
    def count(self) -> int:
        """The number of slots."""
        return len(self._norms.sums)

    @cached_property
    def finite(self) -> Tensor:
        return self._bad.logical_not()


@dataclass(frozen=True)
class Verdict:
    """A divisor (0-dim, or one per slot) and, from methods that skip steps, a 0-dim bool."""

    divisor: Tensor
    skip: Tensor | None = None


class ClipMethod(ABC):
    """Base class of all clip methods. A method with history returns its initial state from `history`.

    `decide` may read `self.state` and must change it through `self.remember`, which leaves it unchanged on a step that is not
    finite. `by_slot = True` declares that the method can limit every slot by its own norm (`measured.clipped_by` or
    `measured.slots`); `per="layer"` and `per="parameter"` raise ConfigError for methods without it.
    """

    by_slot: ClassVar[bool] = False

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    @abstractmethod
    def decide(self, measured: Measured) -> Verdict:
        """Compute the divisor and the skip flag from device tensors, without branching on their values."""

    def history(self, slots: int) -> dict[str, Tensor]:
        """The initial state, for this number of slots."""
        return {}

    def __call__(self, measured: Measured) -> Verdict:
        device = measured.norm.device
        if not self.state:
            self.state = self.history(measured.count)
        self.state = {name: tensor.to(device) for name, tensor in self.state.items()}
        return self.decide(measured)

    def remember(self, finite: Tensor, **new: Tensor) -> None:
        """Store the new values of the named state tensors in place, unless the step is not finite."""
        for name, value in new.items():
            old = self.state[name]
            old.copy_(torch.where(finite, value, old))

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the state; empty before the first step and for methods without memory."""
        return {name: tensor.clone() for name, tensor in self.state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of a method with the same settings."""
        if not state:
            self.state = {}
            return
        slots = max(tensor.numel() for tensor in state.values())
        expected = self.history(slots)
        shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
        found = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if shapes != found:
            raise CheckpointError(
                f"the clip state has shapes {found}, but {type(self).__name__} needs {shapes}; "
                "load it with the clip method and the settings it was saved with",
                code="C083",
            )
        self.state = {name: tensor.detach().clone() for name, tensor in state.items()}


@CLIP_METHOD.register_module("norm")
class NormClip(ClipMethod):
    """A fixed limit for the total norm, or for the norm of every slot; with max_norm = inf nothing is clipped."""

    by_slot = True

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        self.max_norm = positive("max_norm", max_norm)

    def decide(self, measured: Measured) -> Verdict:
        return Verdict(divisor_to(measured.clipped_by, self.max_norm))


# --- Limits that are learnt from past norms ---


_MOST_STEPS = 1_000_000  # a window is sorted at every step


def _fraction(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ConfigError(f"{name} must be a number between 0 and 1, not {value!r}", code="C003")
    return float(value)


def _steps(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_STEPS:
        raise ConfigError(f"{name} must be a number of steps from 1 to {_MOST_STEPS}, not {value!r}", code="C003")
    return value


def _number(value: float = 0.0) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device="cpu")


@CLIP_METHOD.register_module("zclip")
class ZClip(ClipMethod):
    """Clip norms more than `z_max` standard deviations above their moving mean (ZClip, arXiv 2504.02507).

    A norm with z-score z > z_max is clipped to mean + z_max^2 / z deviations. Mean and variance are moving averages with
    weight `alpha` on the past. They start from the first `warmup` steps, in which only `max_norm` clips.
    """

    def __init__(self, z_max: float = 2.5, alpha: float = 0.97, warmup: int = 25, max_norm: float = math.inf) -> None:
        super().__init__()
        self.z_max = positive("z_max", z_max)
        self.alpha = _fraction("alpha", alpha)
        self.warmup = _steps("warmup", warmup)
        self.max_norm = positive("max_norm", max_norm)

    def history(self, slots: int) -> dict[str, Tensor]:
        return {"count": _number(), "mean": _number(), "variance": _number()}

    def decide(self, measured: Measured) -> Verdict:
        norm, state = measured.norm, self.state
        warm = state["count"] < self.warmup
        deviation = state["variance"].sqrt()
        z = (norm - state["mean"]) / (deviation + 1e-6)
        spike = (z > self.z_max) & ~warm
        target = torch.where(spike, state["mean"] + self.z_max * self.z_max * deviation / z, math.inf)

        # The history takes up the clipped norm, so that a spike does not raise the limit of later ones. Mean and variance are
        # those of all norms so far during the warm-up, and moving averages afterwards.
        seen = torch.minimum(norm, target)
        count, mean, variance = state["count"] + 1, state["mean"], state["variance"]
        weight = torch.where(warm, 1 / count, 1 - self.alpha)
        new_mean = mean + weight * (seen - mean)
        squares = torch.where(warm, (seen - mean) * (seen - new_mean), (seen - new_mean).square())
        self.remember(measured.finite, count=count, mean=new_mean, variance=variance + weight * (squares - variance))
        return Verdict(divisor_to(norm, target.clamp(max=self.max_norm)))


class _Windowed(ClipMethod):
    """Keeps the last `window` finite norms."""

    window: int

    def history(self, slots: int) -> dict[str, Tensor]:
        return {"count": _number(), "norms": torch.zeros(self.window, dtype=torch.float64, device="cpu")}

    def _record(self, measured: Measured) -> None:
        count, norms = self.state["count"], self.state["norms"]
        place = (count % self.window).long().view(1)
        self.remember(measured.finite, count=count + 1, norms=norms.index_put((place,), measured.norm))

    def _filled(self) -> Tensor:
        norms = self.state["norms"]
        return torch.arange(self.window, device=norms.device) < self.state["count"]


@CLIP_METHOD.register_module("percentile")
class PercentileClip(_Windowed):
    """Clip to a percentile of the last `window` norms, including the current one (AutoClip, arXiv 2007.14469)."""

    def __init__(self, percentile: float = 10.0, window: int = 1000) -> None:
        super().__init__()
        self.fraction = _fraction("percentile / 100", percentile / 100)
        self.window = _steps("window", window)

    def decide(self, measured: Measured) -> Verdict:
        self._record(measured)
        filled = self._filled()
        ordered = torch.where(filled, self.state["norms"], math.inf).sort().values
        place = self.fraction * (filled.sum().double() - 1)
        below = ordered[place.floor().long().view(1)]
        above = ordered[place.ceil().long().view(1)]
        limit = torch.lerp(below, above, place - place.floor())
        return Verdict(divisor_to(measured.norm, limit.view(()).clamp(min=EPSILON)))


@CLIP_METHOD.register_module("skip_on_spike")
class SkipOnSpike(_Windowed):
    """Skip a step whose norm is more than `sigmas` deviations above the mean of recent norms, or above `bound`.

    The mean is over the last `window` norms and takes effect once half of the window is filled. Norms of skipped steps enter
    the history too, so a lasting change of scale is accepted eventually. Other steps are clipped to `max_norm`.
    """

    def __init__(
        self, sigmas: float = 6.0, window: int = 128, bound: float = math.inf, max_norm: float = math.inf
    ) -> None:
        super().__init__()
        self.sigmas = positive("sigmas", sigmas)
        self.window = _steps("window", window)
        self.bound = positive("bound", bound)
        self.max_norm = positive("max_norm", max_norm)

    def decide(self, measured: Measured) -> Verdict:
        norm, count = measured.norm, self.state["count"].clamp(max=self.window)
        filled, norms = self._filled(), self.state["norms"]
        mean = norms.sum() / count  # NaN before the first step, and no norm is above NaN
        squares = torch.where(filled, norms - mean, 0.0).square().sum() / count
        high = (norm > mean + self.sigmas * squares.sqrt()) & (count >= max(2, self.window // 2))
        self._record(measured)
        return Verdict(divisor_to(norm, self.max_norm), high | (norm > self.bound))


@CLIP_METHOD.register_module("adagc")
class AdaGC(ClipMethod):
    """Clip every slot to `factor` times the moving average of its own clipped norms (AdaGC, arXiv 2502.11034).

    During the first `warmup` steps the total norm is clipped to `max_norm`, and each slot records its smallest norm.
    """

    by_slot = True

    def __init__(self, factor: float = 1.05, beta: float = 0.98, warmup: int = 100, max_norm: float = 1.0) -> None:
        super().__init__()
        self.factor = positive("factor", factor)
        self.beta = _fraction("beta", beta)
        self.warmup = _steps("warmup", warmup)
        self.max_norm = positive("max_norm", max_norm)

    def history(self, slots: int) -> dict[str, Tensor]:
        return {"count": _number(), "average": torch.full((slots,), math.inf, dtype=torch.float64, device="cpu")}

    def decide(self, measured: Measured) -> Verdict:
        count, average = self.state["count"], self.state["average"]
        warm = count < self.warmup
        divisor = torch.where(
            warm, divisor_to(measured.norm, self.max_norm), divisor_to(measured.slots, self.factor * average)
        )
        clipped = measured.slots / divisor
        moved = torch.where(warm, torch.minimum(average, clipped), torch.lerp(clipped, average, self.beta))
        # A slot first seen after the warm-up has no average yet; one without a gradient keeps what it has.
        moved = torch.where(average.isinf(), clipped, moved)
        moved = torch.where(measured.slots > 0, moved, average)
        self.remember(measured.finite, count=count + 1, average=moved)
        return Verdict(divisor)
