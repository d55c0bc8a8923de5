"""Gradient clipping: clip methods, the divisor of a step, and clipping functions for parameters with any placement.

In an engine, clipping is not a separate pass over the gradients. `colonnade.optim.norm` computes the global norms, `ClipPolicy`
turns them into one divisor per slot and a flag that skips the step, and the optimizer divides inside its step. All of these are
device tensors with the same bits on every rank, so ranks need no further agreement and the host never waits for a value.

A clip method computes the limit. Its inputs have the same bits on every rank, and it changes its history, in device tensors, in
place. So all ranks decide alike, and a CUDA graph can contain the step. The gradient is divided by
divisor = max(1, (norm + 1e-6) / limit), the inverse of torch's clip coefficient. The base class comes first, then the fixed limit
(`norm`), then the methods that learn their limit from past norms: `zclip`, `percentile`, `skip_on_spike` and `adagc`. A new
method is a class registered in `CLIP_METHOD`.

The settings are `config.settings.ClipSettings`; only `ClipPolicy.from_settings` interprets them for a run. The last
part needs neither engine nor config: `clip_grad_norm_`, `grad_norm`, `clip_values_`, `clip_units_`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar, get_args
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.comm.messages import HOST_COPY_DELAY, HostCopy
from colonnade.config.settings import ClipGroup, ClipSettings, NonFinite, positive
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError, ConfigError, GradientError, did_you_mean, listed
from colonnade.optim.bucket_step import scale_all
from colonnade.optim.norm import GradientBlock, Norms, check_order, powsums, reduce_norms, to_device
from colonnade.parallel.demand import Holding, holding
from colonnade.parallel.placement import Placement, effective_placement, is_dtensor, local_part
from colonnade.registry import Registry

CLIP_METHOD = Registry("clip method")

EPSILON = 1e-6
"""Added to the norm, as torch does; once for the whole norm."""


def divisor_to(norm: Tensor, limit: Tensor | float) -> Tensor:
    """The divisor that reduces a gradient with this norm to the norm `limit`; 1 if the norm is smaller, or `limit` is inf."""
    if isinstance(limit, float) and math.isinf(limit):
        return torch.ones_like(norm)
    return ((norm + EPSILON) / limit).clamp(min=1.0)


class Measured:
    """The input of a clip method: the total norm, the norm of every slot, and whether all gradients are finite (0-dim).

    `per_slot`: whether every slot is clipped by its own norm.
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
    """The result of a clip method: a divisor (0-dim, or one per slot) and, from methods that skip steps, a 0-dim bool that
    skips the step."""

    divisor: Tensor
    skip: Tensor | None = None


class ClipMethod(ABC):
    """Base class of all clip methods. A method that uses norms of past steps returns its initial state tensors from `history`.

    `decide` may read `self.state`, but must change it only through `self.remember`, which ignores a step with non-finite
    gradients. `by_slot = True` declares that the method can limit every slot by its own norm (`measured.clipped_by` or
    `measured.slots`); `per="layer"` and `per="parameter"` raise ConfigError for methods without it.
    """

    by_slot: ClassVar[bool] = False

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    @abstractmethod
    def decide(self, measured: Measured) -> Verdict:
        """Compute the divisor and the skip flag from device tensors, without branching on their values."""

    def history(self, slots: int) -> dict[str, Tensor]:
        """The initial state tensors of the method, by name, for a model with `slots` slots; empty for a method without memory."""
        return {}

    def __call__(self, measured: Measured) -> Verdict:
        device = measured.norm.device
        if not self.state:
            self.state = self.history(measured.count)
        self.state = {name: tensor.to(device) for name, tensor in self.state.items()}
        return self.decide(measured)

    def remember(self, finite: Tensor, **new: Tensor) -> None:
        """Store new values of the named state tensors in place, unless the gradients of the step are not finite."""
        for name, value in new.items():
            old = self.state[name]
            old.copy_(torch.where(finite, value, old))

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the state; empty before the first step and for methods without memory."""
        return {name: tensor.clone() for name, tensor in self.state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state from `state_dict` of a method with the same settings."""
        if not state:
            self.state = {}
            return
        slots = max(tensor.numel() for tensor in state.values())
        expected = self.history(slots)
        shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
        found = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if shapes != found:
            raise CheckpointError(
                f"the clip state has shapes {found}, but {type(self).__name__} needs {shapes}. Load the state with "
                "the clip method and the settings of the saved run.",
                code="C083",
            )
        self.state = {name: tensor.detach().clone() for name, tensor in state.items()}


@CLIP_METHOD.register_module("norm")
class NormClip(ClipMethod):
    """Clip the total norm, or the norm of every slot, to the fixed limit `max_norm`; with max_norm = inf nothing is clipped."""

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


# --- The decision of one step ---


@dataclass(frozen=True)
class Decision:
    """The result of `ClipPolicy.decide` for one step, as device tensors with the same bits on every rank.

    `norm` is the total norm before clipping (NaN or inf if the gradient was not finite), `divisor` has one number per slot,
    and `found_inf` is exactly 1.0 (skip the step) or 0.0. `nonfinite` is true for a non-finite gradient, which is one of the
    reasons to skip.
    """

    norm: Tensor
    divisor: Tensor
    found_inf: Tensor
    norms: Norms
    nonfinite: Tensor


class ClipPolicy:
    """Clips the total norm by a clip method. A clip group with a limit of its own is clipped by this limit.

    Args:
        method: Computes the divisor for all groups without a limit of their own.
        groups: The clip groups.
        group_of: The index of the group of every slot.
        names: Names of the slots, for messages.
        nonfinite: "skip" a step with a non-finite gradient, skip it and "raise" at the next step, or "propagate" it.
        per_slot: Clip every slot by its own norm instead of the total norm.
    """

    def __init__(
        self,
        method: ClipMethod,
        groups: Sequence[ClipGroup] = (ClipGroup("all"),),
        group_of: Sequence[int] = (0,),
        *,
        names: Sequence[str] | None = None,
        nonfinite: NonFinite = "skip",
        per_slot: bool = False,
    ) -> None:
        known = get_args(NonFinite)
        if nonfinite not in known:
            raise ConfigError(
                f"nonfinite is {nonfinite!r}; allowed are {listed(known)}.{did_you_mean(nonfinite, known)}", code="C003"
            )
        repeated = sorted({group.name for group in groups if [g.name for g in groups].count(group.name) > 1})
        if repeated:
            raise ConfigError(
                f"several clip groups have the same name: {listed(repeated)}. Give each clip group a different name.",
                code="C003",
            )
        if not group_of or not all(0 <= index < len(groups) for index in group_of):
            raise ConfigError(
                f"the norms belong to clip groups {list(group_of)}, but the clip groups are 0 to {len(groups) - 1}. "
                "Pass a valid group for each norm.",
                code="C003",
            )
        if names is not None and len(names) != len(group_of):
            raise ConfigError(
                f"there are {len(group_of)} norms, but {len(names)} names. Pass one name for each norm.", code="C003"
            )
        self.method = method
        self.groups = tuple(groups)
        self.group_of = tuple(group_of)
        self.names = tuple(names or (groups[index].name for index in group_of))
        self.nonfinite, self.per_slot = nonfinite, per_slot
        self._masks = _Masks(self.groups, self.group_of)
        self._reports: deque[HostCopy] = deque()

    @classmethod
    def from_settings(cls, settings: ClipSettings, group_of: Sequence[int], names: Sequence[str]) -> ClipPolicy:
        """Build the policy of a config, for slots with these groups and names."""
        method = CLIP_METHOD.get_module(settings.method)
        per_slot = settings.per != "group"
        if per_slot and not getattr(method, "by_slot", False):
            raise ConfigError(
                f"clip_grad_norm cannot combine method {settings.method!r} and per={settings.per}, because this "
                f"method has a single limit for the total norm. To get the norm of each {settings.per}, use "
                f"report={settings.per!r} instead of per. To limit each norm separately, use the method 'norm' or "
                "'adagc'.",
                code="C003",
            )
        try:
            made = method(**settings.method_options)
        except (TypeError, OverflowError) as error:
            raise ConfigError(
                f"the method {settings.method!r} of clip_grad_norm does not accept the given options: {error}",
                code="C003",
            ) from error
        return cls(made, settings.clip_groups(), group_of, names=names, nonfinite=settings.nonfinite, per_slot=per_slot)

    @property
    def slots(self) -> int:
        """The number of slots."""
        return len(self.group_of)

    def decide(self, norms: Norms) -> Decision:
        """Decide on the divisor and on skipping for one step.

        With nonfinite="raise", first raises for an earlier non-finite step.
        """
        if self.nonfinite == "raise":
            self.raise_pending()

        # The total norm is over the counted slots only, but a non-finite gradient in any slot makes the step bad: the optimizer
        # would write it into weights, whether their slot is counted or not.
        masks = self._masks.to(norms.sums.device)
        total = norms.total(masks.counted)
        bad = (norms.nonfinite.view(()) if self.slots == 1 else norms.nonfinite.sum()) > 0
        limited = self.method(Measured(total, norms, bad, self.per_slot))

        # One divisor per slot. A group with its own limit is divided by its own norm, and a group that is not clipped by 1;
        # all others use the method's divisor. Without such groups there is nothing to select, which saves the launches.
        divisor = limited.divisor.expand(self.slots) if limited.divisor.dim() == 0 else limited.divisor
        if not masks.plain:
            by_group = divisor_to(norms.over(masks.members), masks.limits)
            divisor = torch.where(masks.own, by_group[masks.group_of], divisor)
            divisor = torch.where(masks.clipped, divisor, 1.0)

        # "propagate" lets non-finite gradients through on purpose; the method may skip a step for reasons of its own.
        drop = bad if self.nonfinite != "propagate" else None
        if limited.skip is not None:
            drop = limited.skip if drop is None else drop | limited.skip
        found_inf = total.new_zeros((), dtype=torch.float32) if drop is None else drop.float()
        if self.nonfinite == "raise":
            self._reports.append(HostCopy(norms.nonfinite))
        return Decision(total, divisor, found_inf, norms, bad)

    def raise_pending(self) -> None:
        """Raise if the previous step (on a GPU, the step before it) had a non-finite gradient; only with nonfinite="raise".

        The delay lets the host run ahead of the device. All ranks raise at the same step. The non-finite step itself was skipped on
        every rank.
        """
        slots: list[int] = []
        while self._reports and not slots and (self._reports[0].on_host or len(self._reports) >= HOST_COPY_DELAY):
            slots = [slot for slot, count in enumerate(self._reports.popleft().read()) if count > 0]
        if slots:
            self._reports.clear()
            names = listed(self.names[slot] for slot in slots)
            raise GradientError(
                f"the gradient of an earlier step was not finite, in: {names}. That step was skipped. Lower the "
                "learning rate, or inspect the batch of that step. Set nonfinite='skip' to continue without an error.",
                code="C048",
            )

    def state_dict(self) -> dict[str, Any]:
        """The history of the clip method, for a checkpoint."""
        return {"method": type(self.method).__name__, "state": self.method.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the history of the clip method from `state_dict` of a policy with the same method."""
        if state["method"] != type(self.method).__name__:
            raise CheckpointError(
                f"the clip state was saved by {state['method']}, but this run clips with "
                f"{type(self.method).__name__}. Use the clip method of the saved run. Or omit the clip state to "
                "start with an empty history.",
                code="C083",
            )
        self.method.load_state_dict(state["state"])


class _Masks:
    """Constant masks over slots and groups; they move to the device of the norms at the first step."""

    def __init__(self, groups: Sequence[ClipGroup], group_of: Sequence[int]) -> None:
        self.plain = all(group == ClipGroup(group.name) for group in groups)
        """Whether every group is counted, clipped and without its own limit."""
        self.group_of = torch.tensor(group_of, device="cpu")
        of = [groups[index] for index in group_of]
        self._counted = torch.tensor([group.counted for group in of], device="cpu")
        self.clipped = torch.tensor([group.clipped for group in of], device="cpu")
        self.own = torch.tensor([group.max_norm is not None for group in of], device="cpu")
        limits = [group.max_norm or 1.0 for group in groups]
        self.limits = torch.tensor(limits, dtype=torch.float64, device="cpu")
        self.members = torch.tensor(
            [[index == place for index in group_of] for place in range(len(groups))], device="cpu"
        )

    @property
    def counted(self) -> Tensor | None:
        return None if self.plain else self._counted

    def to(self, device: torch.device) -> _Masks:
        """Move the masks to a device, in place and without waiting for it."""
        if self.own.device != device:
            for name, value in list(vars(self).items()):
                if isinstance(value, Tensor):
                    setattr(self, name, to_device(value, device))
        return self


# --- Functions that need no engine and no config ---


Parameters = Tensor | Iterable[Tensor]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    context: ParallelContext | None = None,
) -> Tensor:
    """Clip gradients in place to a total norm of `max_norm`; a drop-in for `torch.nn.utils.clip_grad_norm_`.

    In a launched context every element of the model's gradient counts once, whatever its placement. DTensors may be on
    different meshes and mixed with plain tensors. Without a launched context, plain tensors are clipped on this rank only, as
    torch does.

    Without a context, ranks outside a DTensor's mesh must hold replicas of it. If they do not (pipeline stages), the norm is
    NaN, and `error_if_nonfinite` raises an error that gives the reason.

    Collective over the world, in a launched context or with DTensors.

    Args:
        parameters: Parameters whose `.grad` is clipped; those without a gradient are ignored.
        max_norm: The largest total norm.
        norm_type: The order p of the norm, up to 32 or inf.
        error_if_nonfinite: Raise on every rank if the norm is NaN or inf; waits for the device.
        foreach: Ignored; accepted for compatibility with torch.
        context: The parallel context; by default the one that was launched.

    Returns:
        The total norm before clipping, as a plain tensor.

    Example::

        gpc = colonnade.launch({})
        model = nn.Linear(4, 2)
        model(torch.ones(8, 4)).sum().backward()
        norm = colonnade.clip_grad_norm_(model.parameters(), max_norm=1.0)
    """
    tensors = _as_list(parameters)
    limit = positive("max_norm", float(max_norm)) if max_norm else 0.0
    norm = grad_norm(tensors, norm_type, error_if_nonfinite=error_if_nonfinite, context=context)
    divisor = divisor_to(norm, limit)  # inf for a limit of 0
    scale_all([parameter.grad for parameter in tensors if parameter.grad is not None], divisor, divide=True)
    return norm


@torch.no_grad()
def grad_norm(
    parameters: Parameters,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    context: ParallelContext | None = None,
) -> Tensor:
    """The total norm of the gradients of all ranks, with the same bits on every rank; at most one collective.

    Arguments and collective ranks are those of `clip_grad_norm_`.
    """
    tensors = _as_list(parameters)
    norm_type = check_order(norm_type)
    context = _context(context)
    # Plain tensors without a launched context concern this process only, as in torch. One DTensor involves the whole world.
    shared = context is not None or any(is_dtensor(parameter) for parameter in tensors)

    # Each element must count once in the world, so every gradient needs its number of replicas: from the layout if there is
    # a context, else from the meshes of DTensors, else 1.
    known: dict[Placement, Holding] = {}
    blocks: list[GradientBlock] = []
    for parameter in tensors:
        if parameter.grad is None:
            continue
        # A DTensor's gradient need not have the placement of its parameter.
        placed: Any = parameter.grad if is_dtensor(parameter.grad) else parameter
        if is_dtensor(parameter.grad) and any(spec.is_partial() for spec in placed.placements):
            raise GradientError(
                f"a gradient has placements {placed.placements} with a pending sum (Partial), so it has no norm. "
                "Redistribute it to Shard or Replicate first."
            )
        count: int = 1
        index: int | None = 0
        if context is not None:
            placement = effective_placement(placed, context.layout, context.get_global_rank())
            if placement not in known:
                known[placement] = holding(context.layout, placement, context.get_global_rank())
            count, index = known[placement].count, known[placement].index
        elif shared:
            count, index = _replicas_by_mesh(placed), None
        blocks.append(GradientBlock(local_part(parameter.grad), count, index))
    vector, replicated = powsums(blocks, norm_type, device=_device(tensors, context)), None

    # Meshes alone cannot tell replicas from pipeline stages, which have meshes of the same shape and other parameters. So
    # every rank sends its mesh coordinates and its own sum in the same collective: equal coordinates must have equal sums.
    local_sum, _ = vector
    evidence = _coordinates_and_sum(tensors, local_sum) if shared and context is None else vector[:0]
    vector = torch.cat([vector, evidence])
    norms = reduce_norms(vector, norm_type, piggybacked=len(evidence), measures_full_gradient=not shared)
    total = norms.total()
    if len(evidence):
        replicated = _are_replicas(vector[-len(evidence) :])
        total = torch.where(replicated, total, torch.nan)

    if error_if_nonfinite and not bool(torch.isfinite(total)):
        if replicated is not None and not bool(replicated):
            raise GradientError(
                "ranks with the same coordinates on the meshes of their DTensors have different gradients. There are "
                "two possible causes. 1. Gradients are not averaged yet: average them first. 2. The ranks are "
                "pipeline stages: pass context=, a launched context, which contains the stages.",
                code="C047",
            )
        raise GradientError(
            f"the total norm of order {norm_type} is {total.item()}, so the gradients cannot be clipped. Pass "
            "error_if_nonfinite=False to continue in this case.",
            code="C048",
        )
    return total


def _replicas_by_mesh(placed: Any) -> int:
    """The number of replicas if there is no context: the world size for a plain tensor, world size / number of shards for a
    DTensor.
    """
    world = dist.get_world_size()
    if not is_dtensor(placed):
        return world
    sizes = placed.device_mesh.shape
    # Not `is_shard()`: that is False for the strided shards of FSDP over tensor parallelism.
    shards = prod(size for size, spec in zip(sizes, placed.placements, strict=True) if not spec.is_replicate())
    return world // shards


def _coordinates_and_sum(tensors: list[Tensor], local_sum: Tensor) -> Tensor:
    """A vector of 2 x world numbers: this rank's mesh coordinates as a checksum, and its sum of powers.

    Other ranks' entries are zero, so that a sum over ranks gathers them. All entries are zero if every mesh is the world.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    gradients: list[Any] = [parameter.grad for parameter in tensors if parameter.grad is not None]
    evidence = local_sum.new_zeros(2, world)
    if any(is_dtensor(gradient) and gradient.device_mesh.size() < world for gradient in gradients):
        places = [gradient.device_mesh.get_coordinate() if is_dtensor(gradient) else None for gradient in gradients]
        mark = 1 + crc32(repr(places).encode())  # never 0
        evidence[0, rank], evidence[1, rank] = mark, local_sum
    return evidence.flatten()


def _are_replicas(evidence: Tensor) -> Tensor:
    """Whether ranks with equal mesh coordinates have equal sums, as a boolean on the device."""
    places, sums = evidence.view(2, -1)
    places, order = places.sort()
    sums = sums[order]
    return ~((places[1:] == places[:-1]) & (sums[1:] != sums[:-1])).any()


def _device(tensors: list[Tensor], context: ParallelContext | None) -> torch.device | None:
    """The device of the norm's collective, which may differ from the device of some gradients."""
    if context is not None:
        return context.device
    return next((parameter.device for parameter in tensors if parameter.device.type != "cpu"), None)


def _context(context: ParallelContext | None) -> ParallelContext | None:
    """The given context, or the global one; None if that context is not launched."""
    if context is None:
        from colonnade.core import global_context

        context = global_context
    return context if context.is_launched else None


def _as_list(parameters: Parameters) -> list[Tensor]:
    """The distinct parameters, as a list: a generator would be exhausted by the norm, and nothing would be clipped."""
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return list({id(parameter): parameter for parameter in tensors}.values())


@torch.no_grad()
def clip_values_(grads: Iterable[Tensor], limit: float) -> None:
    """Clamp every element to [-limit, limit], in place. Needs no communication, whatever the placement."""
    bound = positive("the limit of a value clip", limit)
    tensors = [grad for grad in grads if grad.numel()]
    if any(grad.is_complex() for grad in tensors):
        raise GradientError("clip_values_ does not support complex gradients. Clip complex gradients by their norm.")
    if tensors:
        torch._foreach_clamp_min_(tensors, -bound)
        torch._foreach_clamp_max_(tensors, bound)


@dataclass(frozen=True)
class UnitBlock:
    """A local parameter and its gradient, for clipping by units.

    The units of a tensor are its rows (dimension 0); a vector is one unit.

    `group` has the ranks that store the other shards of the same units: the ranks over which a vector, or a dimension other than
    the first, is sharded. None if no unit is sharded.
    """

    param: Tensor
    grad: Tensor
    group: dist.ProcessGroup | None = None


@torch.no_grad()
def clip_units_(blocks: Sequence[UnitBlock], factor: float = 0.01, eps: float = 1e-3) -> None:
    """Adaptive gradient clipping (arXiv 2102.06171): clip every unit's gradient norm to `factor` x its weight norm.

    A weight norm below `eps` counts as `eps`. Collective over every group in `blocks`, with one all-reduce per group: all ranks
    of a group must pass its blocks in the same order, including blocks of which they store no element.
    """
    positive("the factor of a unit clip", factor)
    positive("eps of a unit clip", eps)
    by_group: dict[dist.ProcessGroup | None, list[UnitBlock]] = {}
    for block in blocks:
        by_group.setdefault(block.group, []).append(block)
    for group, members in by_group.items():
        # The squared norms of all units of all blocks make one vector: weight, gradient, weight, gradient ...
        tensors = [tensor for block in members for tensor in (block.param, block.grad)]
        squares: list[Tensor] = []
        for tensor in tensors:
            rows = tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(1, -1)
            wide = torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else torch.float32
            rows = rows.abs() if rows.is_complex() else rows
            squares.append(torch.linalg.vector_norm(rows, dim=1, dtype=wide).square())
        summed = torch.cat(squares)
        if group is not None:
            dist.all_reduce(summed, group=group)
        norms = iter(summed.sqrt().split([len(rows) for rows in squares]))
        for block in members:
            weight, grad = next(norms), next(norms)
            limit = weight.clamp(min=eps) * factor
            scale = torch.fmin(limit / grad, torch.ones_like(grad))  # 1 where a norm is NaN
            block.grad.mul_(scale.view(-1, *[1] * (block.grad.dim() - 1)) if block.grad.dim() else scale.view(()))
