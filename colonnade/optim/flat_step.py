"""An optimizer step over flat memory: many parameters, with their gradients and moments, updated in one launch.

`FlatStep` takes a plain torch AdamW, Adam or SGD and the flat gradient buckets, and does what `optimizer.step()` would do on
the gradient divided by the clip divisor. The division is part of the update: a clipped step reads the gradient once for the
norm and once for the update, and no clipped gradient is written. The optimizer stays the user's: its parameter groups, hooks,
schedulers, `zero_grad` and state dictionaries work as before, since its state tensors are views of the flat memory.

A step, in order: the set of parameters with a gradient determines a plan of launches, which is rebuilt only when the set changes.
Step counts are incremented. Each launch updates the spans of one bucket that share a parameter group and a divisor. If the step is
skipped, the counts are decremented again. The host reads no value: divisor and skip flag stay on the device.

The file has, in this order: the step; the flat memory (buckets, parameters, moments, step counts); the launches (Triton
kernels, or torch's fused kernels); and the same launches as a CUDA graph.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as optimizer_module

from colonnade.errors import GradientError
from colonnade.gradients.sums import HALVES
from colonnade.optim.norm import (
    STEP_CHUNK,
    ScatteredGradient,
    chunk_table,
    kernels_available,
    on_device,
    to_device,
)
from colonnade.parallel.flat import FlatLayout, Span, padded

# --- The step ---


def why_not(optimizer: Optimizer) -> str | None:
    """The reason why this optimizer cannot take flat steps; None if flat steps are possible."""
    if type(optimizer) not in (AdamW, Adam, SGD):
        return f"a flat step supports torch's AdamW, Adam and SGD, not {type(optimizer).__name__}"
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(not param.is_floating_point() for param in params):
        return "a flat step does not support complex parameters"
    if type(optimizer) is SGD and any(p.device.type == "cpu" and p.dtype in HALVES for p in params):
        return "torch's fused SGD does not update half-precision parameters on a CPU"
    return next((reason for group in optimizer.param_groups if (reason := _unfit(group))), None)


def _unfit(group: Mapping[str, Any]) -> str | None:
    """The reason why a flat step does not support the options of a parameter group; None if it does."""
    for flag in ("amsgrad", "maximize", "differentiable"):
        if group.get(flag):
            return f"a flat step does not support {flag}=True"
    if any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
        return "a flat step needs betas as numbers, not as tensors"
    if group.get("eps") == 0:
        return "a flat step needs eps > 0: with eps=0 the padding between parameters becomes NaN"
    return None


@dataclass
class _LaunchPlan:
    """The launches of a step, for one set of parameters that have a gradient.

    `launches` has (launch, parameter group, slot); `counted` is 1 for the parameters whose step is counted and 0 for others, or
    None if all are counted.
    """

    key: object
    launches: list[tuple[StepLaunch, int, int]]
    counted: Tensor | None


class FlatStep:
    """Steps an optimizer over flat buckets. Created once, before the first step.

    Every parameter of the optimizer that can get a gradient must be in exactly one bucket, all on one device. Parameters move
    into flat buffers (and stay the same objects), and so does existing optimizer state. Buckets whose gradients are adjacent in
    memory are joined.

    The Triton kernels leave the gradient unchanged. Torch's kernels, used elsewhere, leave the divided gradient in the bucket,
    except for fp64.

    Args:
        optimizer: The optimizer; `why_not(optimizer)` must be None.
        buckets: The parameters of the optimizer and their gradients.
        graph: Record the launches as a CUDA graph. Flat gradients must then stay at the same addresses; the addresses of scattered ones
            are read from device memory.
    """

    def __init__(self, optimizer: Optimizer, buckets: Sequence[FlatBucket], graph: bool = False) -> None:
        reason = why_not(optimizer)
        if reason is not None:
            raise GradientError(f"{reason}. Use ScaledStep for this optimizer.", code="C070")
        self.optimizer = optimizer
        members = [param for bucket in buckets for param in bucket.members]
        in_buckets = {id(param) for param in members}
        if len(in_buckets) != len(members):
            raise GradientError(
                "a parameter is in the flat buckets twice. List a tied parameter only once.", code="C070"
            )
        devices = {bucket.grad.device for bucket in buckets}
        if len(devices) != 1:
            found = ", ".join(sorted(map(str, devices))) or "no buckets were given; give at least one"
            raise GradientError(f"a flat step needs all buckets on one device, but they are on {found}", code="C070")
        for number, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                if param.requires_grad and id(param) not in in_buckets:
                    raise GradientError(
                        f"parameter {index} of group {number}, of shape {tuple(param.shape)}, is in no bucket, so a "
                        "flat step would not update it. Add the parameter to a bucket, or use ScaledStep.",
                        code="C070",
                    )

        # Parameters are known by their place, counted through all buckets. A bucket may have parameters that are not the optimizer's.
        group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._group_of = [group_of.get(id(param), -1) for param in members]
        self._sizes = [len(group["params"]) for group in optimizer.param_groups]
        self._state = FlatState(optimizer, join_neighbours(buckets), self._group_of)
        self._plan = _LaunchPlan(None, [], None)
        self.graph = StepGraph() if graph else None

        # The hooks hold a weak reference: a discarded flat step must not be kept alive, with its memory, by the optimizer.
        this = weakref.ref(self)

        def loaded(_: Optimizer) -> None:
            step = this()
            if step is not None:
                step._adopt_state()

        self._hooks = [
            optimizer.register_load_state_dict_post_hook(loaded),
            optimizer.register_state_dict_post_hook(_steps_as_torch),
        ]
        self._adopt_state()

    @property
    def params(self) -> list[Tensor]:
        """The flat parameter buffers, in the order of the buckets; joined buckets share a buffer."""
        return [state.params for state in self._state.buckets]

    def step(self, divisor: Tensor, found_inf: Tensor, absent: Collection[int] = ()) -> None:
        """Step on the gradient divided by `divisor`, unless `found_inf` is 1. Runs the optimizer's step hooks.

        Args:
            divisor: One number, or one per slot, on the device.
            found_inf: fp32, exactly 0 or 1, on the device.
            absent: Indices (counted over all buckets) of parameters without a gradient, which are not updated, as in torch.

        In a captured graph, learning rates can change only if they are device tensors.
        """

        def update(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            # Since the last step (or in a step hook) the options or groups may have changed, or parameters may have been given
            # other memory by loading weights.
            groups = optimizer.param_groups
            reason = next((reason for group in groups if (reason := _unfit(group))), None)
            if reason is not None:
                raise GradientError(
                    f"the optimizer was changed after its flat step was made: {reason}. Make a new FlatStep.",
                    code="C070",
                )
            if [len(group["params"]) for group in groups] != self._sizes:
                raise GradientError(
                    "parameters were added to the optimizer after its flat step was made. Make a new FlatStep.",
                    code="C070",
                )
            with torch.no_grad():
                for state in self._state.buckets:
                    state.reclaim()
                plan = self._planned(absent)
                if self.graph is None:
                    self._launch(plan, divisor, found_inf, groups)
                else:
                    self.graph.step(self._launch, plan, divisor, found_inf, groups)

        # Torch's wrapper runs step hooks and records the step in the profiler. It is slow, so it is used only if there is a hook
        # or a profiler.
        hooks: list[Any] = [
            [
                hook
                for hook in self.optimizer._optimizer_step_pre_hooks.values()
                if not getattr(hook, "only_looks", False)
            ],
            self.optimizer._optimizer_step_post_hooks,
            optimizer_module._global_optimizer_pre_hooks,
            optimizer_module._global_optimizer_post_hooks,
        ]
        if any(hooks) or torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            Optimizer.profile_hook_step(update)(self.optimizer)
        else:
            update(self.optimizer)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # LR schedulers check it

    def close(self) -> None:
        """Remove the hooks from the optimizer; parameters and state stay in the flat memory."""
        for hook in self._hooks:
            hook.remove()

    def _launch(
        self, plan: _LaunchPlan, divisor: Tensor, found_inf: Tensor, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        # Bias correction needs the count including this step. Only the device knows whether the step is skipped, so the count
        # is incremented first and decremented by `found_inf` afterwards.
        _advance(self._state.steps, plan.counted, 1.0, 1)
        with on_device(divisor.device):
            for launch, group_index, slot in plan.launches:
                update = launch.sgd if isinstance(self.optimizer, SGD) else launch.adam
                update(groups[group_index], divisor if divisor.numel() == 1 else divisor[slot], found_inf)
        _advance(self._state.steps, plan.counted, found_inf, -1)

    def _planned(self, absent: Collection[int]) -> _LaunchPlan:
        """The launch plan for all parameters except `absent`; the plan of the last step is reused if nothing has changed."""
        key = (sorted(absent), self._state.names())
        if key == self._plan.key:
            return self._plan
        present = {place for place, group in enumerate(self._group_of) if group >= 0}.difference(absent)
        counted = self._state.count(sorted(present))

        mask: Tensor | None = None
        if len(counted) < len(self._state.members):
            mask = torch.zeros(len(self._state.members), dtype=torch.float32, device="cpu")
            mask[torch.tensor(counted, dtype=torch.int64, device="cpu")] = 1.0
            mask = to_device(mask, self._state.steps.device)

        # Adjacent parameters with equal group, slot and step count are one fragment, including padding, and all fragments of a
        # bucket with equal group and slot are one launch. Step counts are on the device only, so their equality is known from
        # histories: the sequences of steps in which parameters took part.
        launches: list[tuple[StepLaunch, int, int]] = []
        for state in self._state.buckets:
            alike: dict[tuple[int, int], list[Fragment]] = {}
            before: tuple[int, int, object] | None = None
            for index, (span, slot) in enumerate(zip(state.bucket.layout.spans, state.slots, strict=True)):
                place = state.first + index
                if place not in present:
                    before = None
                    continue
                kind = (self._group_of[place], slot, self._state.histories[place])
                fragments = alike.setdefault(kind[:2], [])
                start, step = span.start, place
                if kind == before:
                    joined = fragments.pop()
                    start, step = joined.start, joined.step
                fragments.append(Fragment(start, padded(span.stop, state.bucket.layout.dtype), step))
                before = kind
            for (group, slot), found in alike.items():
                fragments = [fragment for fragment in found if fragment.start < fragment.stop]
                if fragments:
                    launches.append((prepare_launch(state, self._state.steps, fragments), group, slot))
        self._plan = _LaunchPlan(key, launches, mask)
        return self._plan

    @torch.no_grad()
    def _adopt_state(self) -> None:
        """Move the optimizer's state (existing or just loaded) into flat memory, and discard all launches."""
        self._state.adopt()
        self._plan = _LaunchPlan(None, [], None)


def _advance(steps: Tensor, counted: Tensor | None, amount: float | Tensor, sign: int) -> None:
    steps.add_(amount if counted is None else counted * amount, alpha=sign)


def _steps_as_torch(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state-dict hook: move step counts to the host, where torch has them for optimizers that are not fused or capturable."""
    on_host = [not (group.get("fused") or group.get("capturable")) for group in state_dict["param_groups"]]
    state = dict(state_dict["state"])
    for group, wanted in zip(state_dict["param_groups"], on_host, strict=True):
        for index in group["params"] if wanted else ():
            if isinstance(state.get(index, {}).get("step"), Tensor):
                state[index] = {**state[index], "step": state[index]["step"].cpu()}
    return {**state_dict, "state": state}


# --- Flat memory: parameters, gradients, moments and step counts ---
#
# The user's optimizer keeps its state dictionary in torch's format; its tensors are views of these buffers.


@dataclass(eq=False)
class FlatBucket:
    """Parameters (`members`), and the flat buffer of their gradients with the same order and offsets.

    `slots` has the index of each parameter's divisor. `params` is the flat buffer that already contains the parameters; if `params`
    is None, a buffer is allocated and the parameters are moved into it.
    """

    layout: FlatLayout
    members: Sequence[Tensor]
    grad: Tensor | ScatteredGradient
    slots: Sequence[int]
    params: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.layout) != len(self.members) or self.grad.numel() != self.layout.numel:
            raise GradientError(
                f"a bucket layout of {len(self.layout)} tensors and {self.layout.numel} elements does not "
                f"fit {len(self.members)} parameters and a gradient buffer of {self.grad.numel()} elements",
                code="C070",
            )


JOINED = 1 << 26
"""The most elements of joined buckets. Moving parameters into flat memory temporarily needs as much memory again."""


def join_neighbours(buckets: Sequence[FlatBucket]) -> list[FlatBucket]:
    """Join buckets whose gradients are adjacent in one buffer, so that they need one launch instead of several."""
    groups: list[list[FlatBucket]] = []
    for bucket in buckets:
        last = groups[-1][-1] if groups else None
        adjacent = (
            last is not None
            and isinstance(last.grad, Tensor)
            and isinstance(bucket.grad, Tensor)
            and last.params is None
            and bucket.params is None
            and (last.layout.dtype, last.grad.dtype) == (bucket.layout.dtype, bucket.grad.dtype)
            and last.grad.untyped_storage().data_ptr() == bucket.grad.untyped_storage().data_ptr()
            and last.grad.storage_offset() + last.grad.numel() == bucket.grad.storage_offset()
            and sum(each.grad.numel() for each in groups[-1]) + bucket.grad.numel() <= JOINED
        )
        if adjacent:
            groups[-1].append(bucket)
        else:
            groups.append([bucket])

    joined: list[FlatBucket] = []
    for group in groups:
        first, *others = group
        if not others:
            joined.append(first)
            continue
        # A layout of all members, whose spans stay at their offsets in the common buffer: gradients do not move.
        members = [member for bucket in group for member in bucket.members]
        layout = FlatLayout(members)
        grads = [bucket.grad for bucket in group if isinstance(bucket.grad, Tensor)]
        start = min(int(grad.storage_offset()) for grad in grads)
        layout.spans = [
            Span(span.start + int(grad.storage_offset()) - start, span.numel)
            for bucket, grad in zip(group, grads, strict=True)
            for span in bucket.layout.spans
        ]
        layout.numel = sum(grad.numel() for grad in grads)
        slots = [slot for bucket in group for slot in bucket.slots]
        grad = next(iter(grads)).as_strided((layout.numel,), (1,), start)
        joined.append(FlatBucket(layout, members, grad, slots))
    return joined


class BucketState:
    """The flat parameters and moments of one bucket; `first` is the index of its first parameter, counted over all buckets."""

    def __init__(self, bucket: FlatBucket, first: int) -> None:
        self.bucket = bucket
        self.first = first
        self.slots = list(bucket.slots)
        self._homes: list[Tensor] = []
        if bucket.params is not None:
            self.params = bucket.params
        else:
            (dtype,) = {member.dtype for member in bucket.members}
            self.params = bucket.layout.allocate(dtype)
            self._homes = bucket.layout.views(self.params)
            for param, home in zip(bucket.members, self._homes, strict=True):
                home.copy_(param.detach())
                param.data = home
        self._pointers = [home.data_ptr() for home in self._homes]
        self.moments: dict[str, Tensor] = {}
        self._views: dict[str, list[Tensor]] = {}

    def moment(self, name: str) -> Tensor:
        """The flat buffer of the moment `name` ("exp_avg"), allocated with zeros at the first call."""
        if name not in self.moments:
            self.moments[name] = torch.zeros_like(self.params)
            self._views[name] = self.bucket.layout.views(self.moments[name])
        return self.moments[name]

    def reclaim(self) -> None:
        """Move parameters back into the flat buffer, with their new values, if their memory was replaced (`p.data = ...`,
        swapped weights)."""
        if not self._homes or [param.data_ptr() for param in self.bucket.members] == self._pointers:
            return
        for param, home in zip(self.bucket.members, self._homes, strict=True):
            if param.data_ptr() != home.data_ptr():
                if (param.shape, param.dtype, param.device) != (home.shape, home.dtype, home.device):
                    raise GradientError(
                        f"a parameter of shape {tuple(home.shape)}, {home.dtype} on {home.device}, was changed to "
                        f"shape {tuple(param.shape)}, {param.dtype} on {param.device}. Change the model before "
                        "initialize().",
                        code="C070",
                    )
                home.copy_(param.detach())
                param.data = home

    def view(self, name: str, index: int) -> Tensor:
        """One parameter's view of a moment."""
        self.moment(name)
        return self._views[name][index]


class FlatState:
    """The state of an optimizer in flat buffers, kept consistent with `optimizer.state` in both directions.

    A place is the index of a parameter, counted over all buckets. `group_of` has the parameter group of every place, -1 for none.
    `steps` has, for every parameter, the number of steps that were not skipped. torch's SGD keeps no such count; here it
    distinguishes the first step of parameters with momentum.
    """

    def __init__(self, optimizer: Optimizer, buckets: Sequence[FlatBucket], group_of: Sequence[int]) -> None:
        self._optimizer = optimizer
        self._group_of = group_of
        self._sgd = isinstance(optimizer, SGD)
        self.buckets: list[BucketState] = []
        self.members: list[Tensor] = []
        for bucket in buckets:
            self.buckets.append(BucketState(bucket, len(self.members)))
            self.members.extend(bucket.members)
        (device,) = {bucket.grad.device for bucket in buckets}
        self.steps = torch.zeros(len(self.members), dtype=torch.float32, device=device)
        self.histories: list[object] = []
        """One object per place, equal where step counts are equal; set by `adopt` before the first step."""
        self._step_views = list(self.steps.unbind())

    def names(self) -> list[tuple[str, ...]]:
        """For every parameter group, the names of its moments under its current options."""
        if not self._sgd:
            return [("exp_avg", "exp_avg_sq")] * len(self._optimizer.param_groups)
        return [("momentum_buffer",) if group["momentum"] else () for group in self._optimizer.param_groups]

    def count(self, present: Sequence[int]) -> list[int]:
        """Return the places in `present` whose parameters have a step count.

        Creates missing state, as torch does at the first step.

        Places with equal `histories` have been counted in the same calls of this method. So equal histories mean equal step counts,
        whichever steps the device skips.
        """
        names = self.names()
        counted = [place for place in present if names[self._group_of[place]]]
        renamed: dict[object, object] = {}
        for place in counted:
            self._point(place, names[self._group_of[place]])
            old = self.histories[place]
            self.histories[place] = renamed.setdefault(old, object())
        return counted

    def adopt(self) -> None:
        """Move `optimizer.state` (existing or just loaded) into the flat buffers."""
        counts = [0.0] * len(self.members)
        names = self.names()
        for bucket in self.buckets:
            for index, param in enumerate(bucket.bucket.members):
                loaded = self._optimizer.state.get(param, {})
                place = bucket.first + index
                kept = names[self._group_of[place]] if self._group_of[place] >= 0 else ()

                # A moment that was not loaded starts from zeros, also where an earlier state has left values.
                for name in {*kept, *bucket.moments}:
                    value, view = loaded.get(name), bucket.view(name, index)
                    if value is None:
                        view.zero_()
                    elif value.data_ptr() != view.data_ptr():
                        view.copy_(value)
                if self._sgd:
                    counts[place] = 1.0 if loaded.get("momentum_buffer") is not None else 0.0
                elif loaded:
                    counts[place] = float(loaded["step"])
                if loaded:
                    self._point(place, [name for name in kept if loaded.get(name) is not None])
        self.steps.copy_(torch.tensor(counts, device="cpu"))
        history = {count: object() for count in counts}
        self.histories = [history[count] for count in counts]

    def _point(self, place: int, names: Sequence[str]) -> None:
        """Make the optimizer's state of one parameter views of the flat buffers."""
        if self._sgd and not names:
            return
        bucket = next(b for b in reversed(self.buckets) if b.first <= place)
        state = self._optimizer.state[self.members[place]]
        if not self._sgd:
            state["step"] = self._step_views[place]
        for name in names:
            state[name] = bucket.view(name, place - bucket.first)


# --- Launches: spans of one bucket that share hyper-parameters and a divisor ---
#
# `TritonLaunch` is one launch that leaves the gradient unchanged. `TorchLaunch` is one call of torch's fused kernels on slices of
# the flat buffers, on any device. These kernels write the divided gradient back while it is in cache, which on a CPU is faster
# than dividing a copy in small pieces.


@dataclass(frozen=True)
class Fragment:
    """Elements [start, stop) of a flat buffer. Their parameters have equal step counts, and `step` is the index of this count."""

    start: int
    stop: int
    step: int


class StepLaunch(ABC):
    """A prepared launch. The argument `group` is the current torch parameter group; step counts already include this step."""

    @abstractmethod
    def adam(self, group: Mapping[str, Any], divisor: Tensor, found_inf: Tensor) -> None:
        """Launch a step of Adam or, with `decoupled_weight_decay`, of AdamW."""

    @abstractmethod
    def sgd(self, group: Mapping[str, Any], divisor: Tensor, found_inf: Tensor) -> None:
        """Launch a step of SGD with or without momentum."""


def prepare_launch(state: BucketState, steps: Tensor, fragments: Sequence[Fragment]) -> StepLaunch:
    """Prepare the fastest launch for these fragments on their device."""
    kinds = (torch.float32, *HALVES)
    if state.params.is_cuda and state.params.dtype in kinds and kernels_available():
        return TritonLaunch(state, steps, fragments)
    return TorchLaunch(state, steps, fragments)


class TorchLaunch(StepLaunch):
    """A launch that calls torch's fused kernels on one slice per fragment."""

    def __init__(self, state: BucketState, steps: Tensor, fragments: Sequence[Fragment]) -> None:
        self._state = state
        self._fragments = fragments
        self._params = self._slices(state.params)
        self._steps = [steps[fragment.step] for fragment in fragments]
        self._moments: dict[str, list[Tensor]] = {}

    def adam(self, group: Mapping[str, Any], divisor: Tensor, found_inf: Tensor) -> None:
        beta1, beta2 = group["betas"]
        grads, scale = self._divided(divisor)
        fused = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        fused(
            self._params,
            grads,
            self._moment("exp_avg"),
            self._moment("exp_avg_sq"),
            [],
            self._steps,
            amsgrad=False,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            grad_scale=scale,
            found_inf=found_inf,
        )

    def sgd(self, group: Mapping[str, Any], divisor: Tensor, found_inf: Tensor) -> None:
        grads, scale = self._divided(divisor)
        momentum = group["momentum"]
        buffers = self._moment("momentum_buffer") if momentum else []
        # Only dampening treats the first step differently. Reading the counts costs nothing on a CPU; on CUDA, where only fp64 with
        # dampening gets here, it waits for the device.
        first_steps = [False] * len(self._fragments)
        if momentum and group["dampening"]:
            first_steps = [count == 1.0 for count in torch.stack(self._steps).tolist()]
        for first in (False, True):
            chosen = [place for place, is_first in enumerate(first_steps) if is_first == first]
            if chosen:
                torch._fused_sgd_(
                    [self._params[place] for place in chosen],
                    [grads[place] for place in chosen],
                    [buffers[place] for place in chosen] if momentum else [],
                    weight_decay=group["weight_decay"],
                    momentum=momentum,
                    lr=group["lr"],
                    dampening=group["dampening"],
                    nesterov=group["nesterov"],
                    maximize=False,
                    is_first_step=first,
                    grad_scale=scale,
                    found_inf=found_inf,
                )

    def _divided(self, divisor: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """The gradient slices, and the divisor that torch's kernel applies. It is fp32, so fp64 gradients are divided here."""
        flat, dtype = self._state.bucket.grad, self._state.params.dtype
        assert isinstance(flat, Tensor)
        grads = self._slices(flat)
        if flat.dtype == dtype and dtype != torch.float64:
            return grads, divisor.float()
        return [torch.div(grad, divisor).to(dtype) for grad in grads], None

    def _moment(self, name: str) -> list[Tensor]:
        if name not in self._moments:
            self._moments[name] = self._slices(self._state.moment(name))
        return self._moments[name]

    def _slices(self, flat: Tensor) -> list[Tensor]:
        return [flat[fragment.start : fragment.stop] for fragment in self._fragments]


class TritonLaunch(StepLaunch):
    """A single launch of a Triton kernel on a table of chunks, for any number of fragments."""

    def __init__(self, state: BucketState, steps: Tensor, fragments: Sequence[Fragment]) -> None:
        from colonnade.optim import optim_kernels

        self._kernels = optim_kernels
        self._state = state
        self._steps = steps
        device = state.params.device
        pieces = list(self._pieces(fragments))
        table = chunk_table([(start, stop) for start, stop, _, _ in pieces], STEP_CHUNK, torch.device("cpu"))
        piece_of = table[:, 2].long()
        table[:, 2] = torch.tensor([step for _, _, step, _ in pieces], device="cpu")[piece_of]
        self._table = to_device(table, device)
        self._owners = to_device(
            torch.tensor([owner for *_, owner in pieces], dtype=torch.int32, device="cpu")[piece_of], device
        )

    def _pieces(self, fragments: Sequence[Fragment]) -> Iterator[tuple[int, int, int, int]]:
        """(start, stop, place of the step count, member) of every piece. Scattered gradients are one piece each."""
        layout = self._state.bucket.layout
        for fragment in fragments:
            if isinstance(self._state.bucket.grad, Tensor):
                yield fragment.start, fragment.stop, fragment.step, 0
                continue
            for index, span in enumerate(layout.spans):
                if fragment.start <= span.start < fragment.stop:
                    yield span.start, padded(span.stop, layout.dtype), fragment.step, index

    def _gradient(self) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
        grad = self._state.bucket.grad
        return (grad, None) if isinstance(grad, Tensor) else (grad.like, (grad.addresses, grad.limits, self._owners))

    def adam(self, group: Mapping[str, Any], divisor: Tensor, found_inf: Tensor) -> None:
        state = self._state
        grad, scattered = self._gradient()
        self._kernels.adam(
            (state.params, grad, state.moment("exp_avg"), state.moment("exp_avg_sq")),
            scattered,
            self._table,
            (self._steps, divisor, found_inf),
            _scalar(group["lr"]),
            group["betas"],
            group["eps"],
            group["weight_decay"],
            group["decoupled_weight_decay"],
        )

    def sgd(self, group: Mapping[str, Any], divisor: Tensor, found_inf: Tensor) -> None:
        state = self._state
        momentum = float(group["momentum"])
        buffer = state.moment("momentum_buffer") if momentum else state.params
        grad, scattered = self._gradient()
        self._kernels.sgd(
            (state.params, grad, buffer),
            scattered,
            self._table,
            (self._steps, divisor, found_inf),
            _scalar(group["lr"]),
            momentum,
            group["dampening"],
            group["weight_decay"],
            group["nesterov"],
        )


def _scalar(lr: float | Tensor) -> float | Tensor:
    """A learning rate for a kernel. A device tensor is kept, so that every replay of a captured graph reads it."""
    return lr if isinstance(lr, Tensor) and lr.is_cuda else float(lr)


# --- CUDA graphs: the same launches on the same memory, recorded once and replayed as one launch ---


Result = TypeVar("Result")

WARM_UP = 2
"""How often work runs before it is recorded; by then kernels are compiled and tables built."""


def check_capturable(parameters: Sequence[Tensor], flat: bool) -> None:
    """Raise if the step on these parameters cannot be a CUDA graph."""
    reason = None if flat else "flat_step is False"
    for parameter in parameters:
        if not parameter.is_cuda:
            reason = f"a parameter or its state is on {parameter.device}, and CUDA graphs need a GPU"
        elif parameter.dtype not in (torch.float32, *HALVES) or not kernels_available():
            reason = f"a parameter has dtype {parameter.dtype}; supported are fp32, bf16 and fp16, with Triton"
    if reason is not None:
        raise GradientError(f"cuda_graph is not available here: {reason}. Remove it from the config.", code="C071")


class Capture:
    """Records work as a CUDA graph and replays it. The result is in the memory of the graph, and every replay overwrites it."""

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._holds: Sequence[object] = ()
        self._values: object = object()  # equal to nothing, so the first run starts a recording
        self._runs: int
        self._result: Any = None

    def run(self, holds: Sequence[object], values: object, work: Callable[[], Result]) -> Result:
        """Run or replay the work.

        A new recording starts if an object in `holds` was replaced by another object, or if `values` has changed.
        """
        same = len(holds) == len(self._holds) and all(a is b for a, b in zip(holds, self._holds, strict=True))
        if not same or values != self._values:
            self._graph, self._result, self._runs = None, None, 0
            self._holds, self._values = tuple(holds), values
        if self._graph is None:
            self._runs += 1
            if self._runs <= WARM_UP:
                return work()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._result = work()
            self._graph = graph
        self._graph.replay()
        return self._result


class StepGraph:
    """Records the launches of a flat step as a CUDA graph, which reads divisor, skip flag and learning rates from device memory."""

    def __init__(self) -> None:
        self._capture = Capture()
        self._divisor = self._found_inf = torch.empty(0, device="cpu")
        self._rates: list[tuple[Tensor, float]] = []

    def step(
        self,
        launch: Callable[[Any, Tensor, Tensor, Sequence[Mapping[str, Any]]], None],
        plan: object,
        divisor: Tensor,
        found_inf: Tensor,
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Run or replay `launch(plan, divisor, found_inf, groups)`, with the groups' learning rates in device memory."""
        # A replay reads the addresses that were recorded, so all inputs are copied to tensors that stay.
        if self._divisor.shape != divisor.shape or self._divisor.device != divisor.device:
            self._divisor, self._found_inf = divisor.clone(), found_inf.clone()
        else:
            self._divisor.copy_(divisor)
            self._found_inf.copy_(found_inf)
        if len(self._rates) != len(groups):
            self._rates = [(torch.empty((), device=self._divisor.device), -1.0) for _ in groups]
        for at, (group, (rate, known)) in enumerate(zip(groups, self._rates, strict=True)):
            given = group["lr"]
            if isinstance(given, Tensor) and given.is_cuda:
                self._rates[at] = given, -1.0
            elif float(given) != known:
                self._rates[at] = rate.fill_(float(given)), float(given)

        # Another plan, tensor or option is another recording; a learning rate is not.
        rates = [rate for rate, _ in self._rates]
        groups_there = [{**group, "lr": rate} for group, rate in zip(groups, rates, strict=True)]
        options = [{key: group[key] for key in group if key not in ("params", "lr")} for group in groups]
        inputs = self._divisor, self._found_inf
        self._capture.run((plan, *inputs, *rates), options, lambda: launch(plan, *inputs, groups_there))
