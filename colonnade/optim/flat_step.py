"""An optimizer step over flat memory: parameters, gradients and moments of many parameters, updated in one launch.

`FlatStep` takes an ordinary torch AdamW, Adam or SGD and the flat gradient buckets, and does what `optimizer.step()`
would do on the gradient divided by the clip's divisor: the division is part of the update, so that a clipped step reads
the gradient once for the norm and once for the update, and writes no clipped gradient. The optimizer stays the user's: its
parameter groups, hooks, schedulers, `zero_grad` and state dictionaries work as before, as its state are views of the flat
memory.

One step: which parameters have a gradient gives a plan of launches (made anew only when that changes); step counts are
advanced; each launch updates the spans of one bucket that share a parameter group and a divisor; counts are taken back
where the step was dropped. The host reads nothing: divisor and drop flag stay on the device.

The file has, in this order: the step; the flat memory (buckets, parameters, moments, step counts); the launches (Triton
kernels, or torch's fused ones); and the same launches as a CUDA graph.
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
from colonnade.optim.norm import STEP_CHUNK, chunk_table, kernels_available, on_device, to_device
from colonnade.parallel.flat import FlatLayout, Span, padded

# --- The step ---


def why_not(optimizer: Optimizer) -> str | None:
    """Why this optimizer cannot take flat steps, or None when it can."""
    if type(optimizer) not in (AdamW, Adam, SGD):
        return f"a flat step knows torch's AdamW, Adam and SGD themselves, not {type(optimizer).__name__}"
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(not param.is_floating_point() for param in params):
        return "a flat step takes real parameters, not complex ones"
    if type(optimizer) is SGD and any(p.device.type == "cpu" and p.dtype in HALVES for p in params):
        return "torch's fused SGD leaves half-precision parameters on a CPU as they are"
    return next((reason for group in optimizer.param_groups if (reason := _unfit(group))), None)


def _unfit(group: Mapping[str, Any]) -> str | None:
    """What a flat step cannot do of the settings of a parameter group."""
    for flag in ("amsgrad", "maximize", "differentiable"):
        if group.get(flag):
            return f"a flat step does not do {flag}=True"
    if any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
        return "a flat step takes betas as numbers, not as tensors"
    if group.get("eps") == 0:
        return "a flat step needs eps above 0: with 0 the padding between parameters becomes NaN"
    return None


@dataclass
class _LaunchPlan:
    """What one step launches, for one set of parameters that have a gradient."""

    key: object
    runs: list[tuple[StepLaunch, int, int]]
    counted: Tensor | None


class FlatStep:
    """Steps an optimizer over flat buckets; made once, before the first step.

    Every parameter of the optimizer that may get a gradient must be in exactly one bucket, all buckets on one
    device. Parameters move into flat buffers (they keep their identity), and so does existing state. On CUDA
    the gradient is left as it is; torch's kernels, used elsewhere, leave the divided gradient in the bucket. Buckets
    whose gradients are neighbours in memory are one.
    """

    def __init__(self, optimizer: Optimizer, buckets: Sequence[FlatBucket], graph: bool = False) -> None:
        """`graph`: the launches are recorded as a CUDA graph. Gradients must stay where they are then."""
        reason = why_not(optimizer)
        if reason is not None:
            raise GradientError(f"{reason}; use ScaledStep for this optimizer", code="C070")
        self.optimizer = optimizer
        self._group_of = _groups_by_place(optimizer, buckets)
        self._sizes = [len(group["params"]) for group in optimizer.param_groups]
        self._state = FlatState(optimizer, join_neighbours(buckets), self._group_of)
        self._plan = _LaunchPlan(None, [], None)
        self.graph = StepGraph() if graph else None

        # The optimizer does not hold on to this object: a step that nobody takes any more must be able to go, with its memory.
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
        """The flat parameter buffers, in the order of the buckets; neighbours in one gradient buffer share one."""
        return [state.params for state in self._state.buckets]

    def step(self, divisor: Tensor, found_inf: Tensor, absent: Collection[int] = ()) -> None:
        """Step on the gradient divided by `divisor` (one number, or one per slot), unless `found_inf` is 1.

        Both are device tensors, `found_inf` fp32 and exactly 0 or 1. The parameters at the places `absent` (counted
        through all buckets) have no gradient and take no part, as in torch. The optimizer's step hooks run around it. In
        a captured graph, only a learning rate in a device tensor can change.
        """

        def update(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            # Someone may have changed the optimizer, or given parameters other memory (loaded weights), since the last step.
            self._check_unchanged()
            with torch.no_grad():
                for state in self._state.buckets:
                    state.reclaim()
                plan = self._planned(absent)
                if self.graph is None:
                    self._launch(plan, divisor, found_inf, optimizer.param_groups)
                else:
                    self.graph.step(self._launch, plan, divisor, found_inf, optimizer.param_groups)

        # Torch's wrapper runs step hooks and tells the profiler. Without either it takes longer than finding that out.
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
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what LR schedulers look for

    def close(self) -> None:
        """Forget the optimizer; its parameters and state stay where they are."""
        for hook in self._hooks:
            hook.remove()

    def _launch(
        self, plan: _LaunchPlan, divisor: Tensor, found_inf: Tensor, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        # Bias corrections need the count of this step. If it is dropped, which only the device knows, the count goes back.
        _advance(self._state.steps, plan.counted, 1.0, 1)
        with on_device(divisor.device):
            for run, group_index, slot in plan.runs:
                update = run.sgd if isinstance(self.optimizer, SGD) else run.adam
                update(groups[group_index], divisor if divisor.numel() == 1 else divisor[slot], found_inf)
        _advance(self._state.steps, plan.counted, found_inf, -1)

    def _check_unchanged(self) -> None:
        groups = self.optimizer.param_groups
        reason = next((reason for group in groups if (reason := _unfit(group))), None)
        if reason is not None:
            raise GradientError(f"the optimizer was changed after its flat step was made: {reason}", code="C070")
        if [len(group["params"]) for group in groups] != self._sizes:
            raise GradientError(
                "parameters were added to the optimizer after its flat step was made; make a new FlatStep", code="C070"
            )

    def _planned(self, absent: Collection[int]) -> _LaunchPlan:
        """The launches for the parameters that have a gradient now; the last ones if nothing changed."""
        key = (sorted(absent), self._state.names())
        if key == self._plan.key:
            return self._plan
        present = {place for place, group in enumerate(self._group_of) if group >= 0}.difference(absent)
        counted = self._state.count(sorted(present))

        # 1 for the parameters whose step is counted and 0 for the others; None when all are.
        mask: Tensor | None = None
        if len(counted) < len(self._state.members):
            mask = torch.zeros(len(self._state.members), dtype=torch.float32, device="cpu")
            mask[torch.tensor(counted, dtype=torch.int64, device="cpu")] = 1.0
            mask = to_device(mask, self._state.steps.device)

        # Neighbours in memory alike in group, slot and history are one fragment, padding and all; the fragments of a bucket
        # alike in group and slot are one launch. Histories, not counts: those are known on the device alone.
        runs: list[tuple[StepLaunch, int, int]] = []
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
                    runs.append((prepare(state, self._state.steps, fragments), group, slot))
        self._plan = _LaunchPlan(key, runs, mask)
        return self._plan

    @torch.no_grad()
    def _adopt_state(self) -> None:
        """Move what the optimizer's state holds (loaded, or from before) into flat memory; all launches are made anew."""
        self._state.adopt()
        self._plan = _LaunchPlan(None, [], None)


def _advance(steps: Tensor, counted: Tensor | None, amount: float | Tensor, sign: int) -> None:
    steps.add_(amount if counted is None else counted * amount, alpha=sign)


def _steps_as_torch(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Torch keeps the step counts of plain optimizers on the host; so does the dictionary it gets from us."""
    on_host = [not (group.get("fused") or group.get("capturable")) for group in state_dict["param_groups"]]
    state = dict(state_dict["state"])
    for group, wanted in zip(state_dict["param_groups"], on_host, strict=True):
        for index in group["params"] if wanted else ():
            if isinstance(state.get(index, {}).get("step"), Tensor):
                state[index] = {**state[index], "step": state[index]["step"].cpu()}
    return {**state_dict, "state": state}


def _groups_by_place(optimizer: Optimizer, buckets: Sequence[FlatBucket]) -> list[int]:
    """The parameter group of every bucket member, -1 for one the optimizer does not have."""
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    members = [param for bucket in buckets for param in bucket.members]
    if len({id(param) for param in members}) != len(members):
        raise GradientError("a parameter is in the flat buckets twice; a tied parameter is one member", code="C070")
    devices = {bucket.grad.device for bucket in buckets}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no bucket at all"
        raise GradientError(f"a flat step needs buckets on one device, met: {found}", code="C070")
    held = {id(param) for param in members}
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            if param.requires_grad and id(param) not in held:
                raise GradientError(
                    f"parameter {index} of group {number}, of shape {tuple(param.shape)}, is in no bucket: "
                    "a flat step would leave it out; put it into a bucket or use ScaledStep",
                    code="C070",
                )
    return [group_of.get(id(param), -1) for param in members]


# --- Flat memory: what a step touches, parameters, moments and step counts ---
#
# The user's optimizer keeps its own state dictionary, in torch's format; its tensors are views of these buffers.


@dataclass(eq=False)
class FlatBucket:
    """Parameters, and the flat buffer of their gradients in the same order with the same offsets.

    `slots` gives each parameter's place in the divisor. `params` is the flat buffer
    that the parameters already are views of; without it one is made, and the parameters are moved into
    it.
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


class ScatteredGradient:
    """Gradients that lie anywhere, as a kernel finds them: where element 0 of the flat buffer would be for each of them."""

    def __init__(self, layout: FlatLayout) -> None:
        self.dtype, self.device = layout.dtype, layout.device
        self.like = torch.empty((), dtype=layout.dtype, device=layout.device)
        self.addresses = torch.zeros(len(layout), dtype=torch.int64, device=layout.device)
        self.limits = to_device(torch.tensor([span.stop for span in layout.spans], device="cpu"), layout.device)
        self._numel, self._known = layout.numel, list[int]()

    def numel(self) -> int:
        """The elements of the flat buffer."""
        return self._numel

    def point_to(self, addresses: list[int]) -> None:
        """The gradients are there now."""
        if addresses != self._known:
            self.addresses.copy_(pinned(torch.tensor(addresses, device="cpu")), non_blocking=True)
            self._known = addresses


def pinned(numbers: Tensor) -> Tensor:
    """The same, where the device can fetch them while the host goes on."""
    return numbers.pin_memory()


JOINED = 1 << 26
"""Elements of joined buckets at most. Moving in and out needs as much memory again, for a moment."""


def join_neighbours(buckets: Sequence[FlatBucket]) -> list[FlatBucket]:
    """The same buckets, those made one whose gradients follow each other in one buffer: one launch instead of many."""
    groups: list[list[FlatBucket]] = []
    for bucket in buckets:
        if groups and _follows(groups[-1], bucket):
            groups[-1].append(bucket)
        else:
            groups.append([bucket])
    return [_joined(*group) for group in groups]


def _follows(group: Sequence[FlatBucket], bucket: FlatBucket) -> bool:
    last = group[-1]
    return (
        isinstance(last.grad, Tensor)
        and isinstance(bucket.grad, Tensor)
        and last.params is None
        and bucket.params is None
        and (last.layout.dtype, last.grad.dtype) == (bucket.layout.dtype, bucket.grad.dtype)
        and last.grad.untyped_storage().data_ptr() == bucket.grad.untyped_storage().data_ptr()
        and last.grad.storage_offset() + last.grad.numel() == bucket.grad.storage_offset()
        and sum(each.grad.numel() for each in group) + bucket.grad.numel() <= JOINED
    )


def _joined(*group: FlatBucket) -> FlatBucket:
    first, *others = group
    if not others:
        return first
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
    return FlatBucket(layout, members, next(iter(grads)).as_strided((layout.numel,), (1,), start), slots)


class BucketState:
    """The flat parameters and moments of one bucket; `first` is the place of its step counts among all."""

    def __init__(self, bucket: FlatBucket, first: int) -> None:
        self.bucket = bucket
        self.first = first
        self.slots = list(bucket.slots)
        self.params = bucket.params if bucket.params is not None else _move_in(bucket)
        self._homes = bucket.layout.views(self.params) if bucket.params is None else []
        self._pointers = [home.data_ptr() for home in self._homes]
        self.moments: dict[str, Tensor] = {}
        self._views: dict[str, list[Tensor]] = {}

    def moment(self, name: str) -> Tensor:
        """The flat buffer of a moment, made of zeros when first asked for."""
        if name not in self.moments:
            self.moments[name] = torch.zeros_like(self.params)
            self._views[name] = self.bucket.layout.views(self.moments[name])
        return self.moments[name]

    def reclaim(self) -> None:
        """Bring parameters that were given other memory (`p.data = ...`, weights that were swapped) back, with their values."""
        if not self._homes or [param.data_ptr() for param in self.bucket.members] == self._pointers:
            return
        for param, home in zip(self.bucket.members, self._homes, strict=True):
            if param.data_ptr() != home.data_ptr():
                if (param.shape, param.dtype, param.device) != (home.shape, home.dtype, home.device):
                    raise GradientError(
                        f"a parameter of shape {tuple(home.shape)}, {home.dtype} on {home.device}, has become one of shape "
                        f"{tuple(param.shape)}, {param.dtype} on {param.device}; change the model before initialize()",
                        code="C070",
                    )
                home.copy_(param.detach())
                param.data = home

    def view(self, name: str, index: int) -> Tensor:
        """One parameter's view of a moment."""
        self.moment(name)
        return self._views[name][index]


def _move_in(bucket: FlatBucket) -> Tensor:
    (dtype,) = {member.dtype for member in bucket.members}
    flat = bucket.layout.allocate(dtype)
    for param, view in zip(bucket.members, bucket.layout.views(flat), strict=True):
        view.copy_(param.detach())
        param.data = view
    return flat


class FlatState:
    """The state of an optimizer in flat buffers, kept in step with `optimizer.state` in both directions.

    `group_of` gives every parameter's group, -1 for none. `steps` counts the steps of every parameter that were
    not dropped; for SGD, which has no such state, those with momentum, to tell the first from the later ones.
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
        """Which parameters have equal step counts; of `adopt`, which comes before the first step."""
        self._step_views = list(self.steps.unbind())

    def names(self) -> list[tuple[str, ...]]:
        """The moments that every group keeps now."""
        if not self._sgd:
            return [("exp_avg", "exp_avg_sq")] * len(self._optimizer.param_groups)
        return [("momentum_buffer",) if group["momentum"] else () for group in self._optimizer.param_groups]

    def count(self, present: Sequence[int]) -> list[int]:
        """Those of these parameters whose steps are counted; from now on, only they take counted steps.

        They get their state, as in torch at the first step in which they take part. Parameters with equal
        `histories` have equal step counts, whatever was dropped on the device.
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
        """Move what `optimizer.state` holds (loaded, or from before) into the flat buffers."""
        counts = [0.0] * len(self.members)
        names = self.names()
        for bucket in self.buckets:
            for index, param in enumerate(bucket.bucket.members):
                loaded = self._optimizer.state.get(param, {})
                place = bucket.first + index
                kept = names[self._group_of[place]] if self._group_of[place] >= 0 else ()
                counts[place] = self._copy_in(bucket, index, kept, loaded)
                if loaded:
                    self._point(place, [name for name in kept if loaded.get(name) is not None])
        self.steps.copy_(torch.tensor(counts, device="cpu"))
        alike = {count: object() for count in counts}
        self.histories = [alike[count] for count in counts]

    def _copy_in(self, bucket: BucketState, index: int, names: Sequence[str], loaded: Mapping[str, Any]) -> float:
        """Fill one parameter's moments with what was loaded, else zeros; returns its step count."""
        for name in {*names, *bucket.moments}:
            value = loaded.get(name)
            view = bucket.view(name, index)
            if value is None:
                view.zero_()
            elif value.data_ptr() != view.data_ptr():
                view.copy_(value)
        if self._sgd:
            return 1.0 if loaded.get("momentum_buffer") is not None else 0.0
        return float(loaded["step"]) if loaded else 0.0

    def _point(self, place: int, names: Sequence[str]) -> None:
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
# `KernelRun` is one Triton launch that leaves the gradient alone. `TorchRun` is one call of torch's fused kernels over flat
# pieces, anywhere they exist; those write the divided gradient back while it is in cache, which on a CPU is faster than a
# second copy of it in small pieces.


@dataclass(frozen=True)
class Fragment:
    """Elements [start, stop) of parameters with equal step counts, to be found at place `step`."""

    start: int
    stop: int
    step: int


class StepLaunch(ABC):
    """A prepared launch. `group` is the torch parameter group as it is now; counts are already advanced."""

    @abstractmethod
    def adam(self, group: Mapping[str, Any], divisor: Tensor, found_inf: Tensor) -> None:
        """Adam or, with `decoupled_weight_decay`, AdamW."""

    @abstractmethod
    def sgd(self, group: Mapping[str, Any], divisor: Tensor, found_inf: Tensor) -> None:
        """SGD with or without momentum."""


def prepare(state: BucketState, steps: Tensor, fragments: Sequence[Fragment]) -> StepLaunch:
    """The fastest run for these spans on their device."""
    kinds = (torch.float32, *HALVES)
    if state.params.is_cuda and state.params.dtype in kinds and kernels_available():
        return KernelRun(state, steps, fragments)
    return TorchRun(state, steps, fragments)


class TorchRun(StepLaunch):
    """Torch's fused kernels on one piece per fragment."""

    def __init__(self, state: BucketState, steps: Tensor, fragments: Sequence[Fragment]) -> None:
        self._state = state
        self._fragments = fragments
        self._params = self._cut(state.params)
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
        for first in (False, True):
            chosen = [place for place, is_first in enumerate(self._firsts(group)) if is_first == first]
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

    def _firsts(self, group: Mapping[str, Any]) -> list[bool]:
        """Which fragments take their first step, where that matters: only dampening treats it differently.

        Reading the counts costs nothing on a CPU; on CUDA (fp64 with dampening alone comes here) it waits.
        """
        if not (group["momentum"] and group["dampening"]):
            return [False] * len(self._fragments)
        return [count == 1.0 for count in torch.stack(self._steps).tolist()]

    def _divided(self, divisor: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """The gradient pieces, and the divisor torch's kernel is to apply (fp32: too coarse for fp64)."""
        flat, dtype = self._state.bucket.grad, self._state.params.dtype
        assert isinstance(flat, Tensor)
        grads = self._cut(flat)
        if flat.dtype == dtype and dtype != torch.float64:
            return grads, divisor.float()
        return [torch.div(grad, divisor).to(dtype) for grad in grads], None

    def _moment(self, name: str) -> list[Tensor]:
        if name not in self._moments:
            self._moments[name] = self._cut(self._state.moment(name))
        return self._moments[name]

    def _cut(self, flat: Tensor) -> list[Tensor]:
        return [flat[fragment.start : fragment.stop] for fragment in self._fragments]


class KernelRun(StepLaunch):
    """The Triton kernels on a table of chunks: one launch whatever the number of fragments."""

    def __init__(self, state: BucketState, steps: Tensor, fragments: Sequence[Fragment]) -> None:
        from colonnade.optim.kernels import step_kernels

        self._kernels = step_kernels
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
        """(start, stop, place of the step count, which member): gradients that are scattered are read one by one."""
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
    """A learning rate for a kernel: a device tensor stays one, so that a captured graph reads it anew."""
    return lr if isinstance(lr, Tensor) and lr.is_cuda else float(lr)


# --- CUDA graphs: work that launches the same kernels on the same memory is recorded once, and repeated as one launch ---


Result = TypeVar("Result")

WARM_UP = 2
"""How often work runs as it is before it is recorded: kernels are compiled and tables made by then."""


def check_capturable(parameters: Sequence[Tensor], flat: bool) -> None:
    """Refuse parameters whose step cannot be a CUDA graph."""
    reason = None if flat else "flat_step is False"
    for parameter in parameters:
        if not parameter.is_cuda:
            reason = f"a parameter, or its state, is on {parameter.device}, and CUDA graphs are of a GPU"
        elif parameter.dtype not in (torch.float32, *HALVES) or not kernels_available():
            reason = f"a parameter is of {parameter.dtype}; it can be done for fp32, bf16 and fp16, with Triton"
    if reason is not None:
        raise GradientError(f"graph_step=True cannot be done: {reason}. Leave it out.")


class Capture:
    """A piece of work, recorded. What it returns lies in memory of its own, and is written over when it is repeated."""

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._holds: Sequence[object] = ()
        self._values: object = object()  # the first run is anew
        self._runs: int
        self._result: Any = None

    def run(self, holds: Sequence[object], values: object, work: Callable[[], Result]) -> Result:
        """Do the work. It is recorded anew when one of the objects that it reads is another, or a value has changed."""
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
    """The launches of a flat step as a CUDA graph. Divisor, drop flag and learning rates are read from device memory."""

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
        """`launch(plan, divisor, found_inf, groups)`, whose groups have their learning rates on the device."""
        if self._divisor.shape != divisor.shape or self._divisor.device != divisor.device:
            self._divisor, self._found_inf = divisor.clone(), found_inf.clone()
        else:
            self._divisor.copy_(divisor)
            self._found_inf.copy_(found_inf)
        rates = self._on_device(groups)
        moved = [{**group, "lr": rate} for group, rate in zip(groups, rates, strict=True)]
        settings = [{key: group[key] for key in group if key not in ("params", "lr")} for group in groups]
        inputs = self._divisor, self._found_inf
        self._capture.run((plan, *inputs, *rates), settings, lambda: launch(plan, *inputs, moved))

    def _on_device(self, groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """The groups' learning rates as they are now, each where it was before."""
        if len(self._rates) != len(groups):
            self._rates = [(torch.empty((), device=self._divisor.device), -1.0) for _ in groups]
        for at, (group, (held, known)) in enumerate(zip(groups, self._rates, strict=True)):
            rate = group["lr"]
            if isinstance(rate, Tensor) and rate.is_cuda:
                self._rates[at] = rate, -1.0
            elif float(rate) != known:
                self._rates[at] = held.fill_(float(rate)), float(rate)
        return [rate for rate, _ in self._rates]
