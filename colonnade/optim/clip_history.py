"""Clip methods that learn their limit from past norms: ZClip, AutoClip, AdaGC and skipping spikes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from colonnade.config.settings import positive
from colonnade.errors import ConfigError
from colonnade.optim.clip_method import CLIP_METHOD, EPSILON, ClipMethod, Measured, Verdict, divisor_to

_MOST_STEPS = 1_000_000  # a window is sorted at every step


def _fraction(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ConfigError(f"{name} is a number between 0 and 1, not {value!r}", code="C003")
    return float(value)


def _steps(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_STEPS:
        raise ConfigError(f"{name} is a number of steps from 1 to {_MOST_STEPS}, not {value!r}", code="C003")
    return value


def _number(value: float = 0.0) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device="cpu")


@CLIP_METHOD.register_module("zclip")
class ZClip(ClipMethod):
    """Shrink a norm more than `z_max` standard deviations above its moving mean (ZClip, 2504.02507).

    A norm with z-score z > z_max is brought down to mean + z_max^2 / z deviations. Mean and variance are
    moving averages with weight `alpha` on the past, started from `warmup` steps that only `max_norm`
    clips.
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
        self._learn(measured, warm, torch.minimum(norm, target))
        return Verdict(divisor_to(norm, target.clamp(max=self.max_norm)))

    def _learn(self, measured: Measured, warm: Tensor, seen: Tensor) -> None:
        count, mean, variance = self.state["count"] + 1, self.state["mean"], self.state["variance"]
        # In the warm-up the plain mean and variance of all norms so far, afterwards the moving ones.
        weight = torch.where(warm, 1 / count, 1 - self.alpha)
        new_mean = mean + weight * (seen - mean)
        squares = torch.where(warm, (seen - mean) * (seen - new_mean), (seen - new_mean).square())
        self.remember(measured.finite, count=count, mean=new_mean, variance=variance + weight * (squares - variance))


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
    """Limit the norm to a percentile of the last `window` norms, this one included (AutoClip, 2007.14469)."""

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
    """Drop a step whose norm is `sigmas` deviations above the mean of the last ones, or above `bound`.

    The mean is over `window` norms, and is used once half of them are there. A dropped norm is remembered
    too, so a lasting change of scale is accepted in the end. Steps that are kept are clipped to `max_norm`.
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
        mean = norms.sum() / count  # NaN before the first: no norm is above it
        squares = torch.where(filled, norms - mean, 0.0).square().sum() / count
        high = (norm > mean + self.sigmas * squares.sqrt()) & (count >= max(2, self.window // 2))
        self._record(measured)
        return Verdict(divisor_to(norm, self.max_norm), high | (norm > self.bound))


@CLIP_METHOD.register_module("adagc")
class AdaGC(ClipMethod):
    """Limit every slot to `factor` times the moving average of its own clipped norms (AdaGC, 2502.11034).

    For `warmup` steps the total norm is clipped to `max_norm`, and each slot remembers its smallest norm.
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
