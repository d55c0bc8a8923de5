"""Clip and step over flat buffers: one pass for the norm, one for the update, nothing in between.

`FlatStep` takes an ordinary torch AdamW, Adam or SGD and the flat gradient buckets, and does what
`optimizer.step()` would do on the clipped gradient. The optimizer stays the user's: its parameter groups,
hooks, schedulers, `zero_grad` and state dictionaries work as before.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as optimizer_module

from colonnade.errors import GradientError
from colonnade.optim.blocks import on_device, to_device
from colonnade.optim.capture import StepGraph
from colonnade.optim.flat_runs import Fragment, Run, prepare
from colonnade.optim.flat_state import FlatBucket, FlatState, join_neighbours
from colonnade.parallel.flat import padded
from colonnade.reduce.options import HALVES


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
class _Plan:
    """What one step launches, for one set of parameters that have a gradient."""

    key: object
    runs: list[tuple[Run, int, int]]
    counted: Tensor | None


class FlatStep:
    """Steps an optimizer over flat buckets; made once, before the first step.

    Every parameter of the optimizer that may get a gradient must be in exactly one bucket, all buckets on one
    device. Parameters move into flat buffers (they keep their identity), and so does existing state. On CUDA
    the gradient is left as it is; torch's kernels, used elsewhere, leave the divided gradient in the bucket. Buckets
    whose gradients are neighbours in memory are one.
    """

    def __init__(self, optimizer: Optimizer, buckets: Sequence[FlatBucket]) -> None:
        reason = why_not(optimizer)
        if reason is not None:
            raise GradientError(f"{reason}; use ScaledStep for this optimizer", code="C070")
        self.optimizer = optimizer
        self._group_of = _groups_by_place(optimizer, buckets)
        self._sizes = [len(group["params"]) for group in optimizer.param_groups]
        self._state = FlatState(optimizer, join_neighbours(buckets), self._group_of)
        self._plan = _Plan(None, [], None)
        self._asked: tuple[Tensor, Tensor, Collection[int]]
        self.graph: StepGraph | None = None
        """Set by whoever wants the launches as a CUDA graph. Gradients must stay where they are then."""
        # Not a reference to this object: a step that nobody takes any more must be able to go, with its memory.
        loaded = weakref.WeakMethod(self._loaded)
        self._hooks = [
            optimizer.register_load_state_dict_post_hook(lambda optimizer: (loaded() or _nothing)(optimizer)),
            optimizer.register_state_dict_post_hook(_steps_as_torch),
        ]
        self._loaded(optimizer)

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
        self._asked = (divisor, found_inf, absent)
        if _is_watched(self.optimizer):
            Optimizer.profile_hook_step(self._update)(self.optimizer)
        else:
            self._update(self.optimizer)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what LR schedulers look for

    def close(self) -> None:
        """Forget the optimizer; its parameters and state stay where they are."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _update(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self._check_unchanged()
        for state in self._state.buckets:
            state.reclaim()
        divisor, found_inf, absent = self._asked
        plan = self._planned(absent)
        if self.graph is None:
            self._launch(plan, divisor, found_inf, optimizer.param_groups)
        else:
            self.graph.step(self._launch, plan, divisor, found_inf, optimizer.param_groups)

    def _launch(self, plan: _Plan, divisor: Tensor, found_inf: Tensor, groups: Sequence[Mapping[str, Any]]) -> None:
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

    def _planned(self, absent: Collection[int]) -> _Plan:
        """The launches for the parameters that have a gradient now; the last ones if nothing changed."""
        key = (sorted(absent), self._state.names())
        if key != self._plan.key:
            present = [place for place, group in enumerate(self._group_of) if group >= 0]
            present = sorted(set(present).difference(absent))
            counted = self._state.count(present)
            self._plan = _Plan(key, self._runs(set(present)), self._mask(counted))
        return self._plan

    def _runs(self, present: Set[int]) -> list[tuple[Run, int, int]]:
        """Neighbours alike in group, slot and history are a fragment; fragments alike in group and slot a run."""
        runs: list[tuple[Run, int, int]] = []
        for state in self._state.buckets:
            alike: dict[tuple[int, int], list[Fragment]] = {}
            before: tuple[int, int, object] | None = None
            for index, (span, slot) in enumerate(zip(state.bucket.layout.spans, state.slots, strict=True)):
                place = state.first + index
                if place not in present:
                    before = None
                    continue
                key = (self._group_of[place], slot, self._state.histories[place])
                fragments = alike.setdefault(key[:2], [])
                start, step = span.start, place
                if key == before:
                    joined = fragments.pop()
                    start, step = joined.start, joined.step
                fragments.append(Fragment(start, padded(span.stop, state.bucket.layout.dtype), step))
                before = key
            for (group, slot), found in alike.items():
                fragments = [fragment for fragment in found if fragment.start < fragment.stop]
                if fragments:
                    runs.append((prepare(state, self._state.steps, fragments), group, slot))
        return runs

    def _mask(self, counted: Sequence[int]) -> Tensor | None:
        """1 for the parameters whose step is counted and 0 for the others; None when all are."""
        count = len(self._state.members)
        if len(counted) == count:
            return None
        mask = torch.zeros(count, dtype=torch.float32, device="cpu")
        mask[torch.tensor(counted, dtype=torch.int64, device="cpu")] = 1.0
        return to_device(mask, self._state.steps.device)

    @torch.no_grad()
    def _loaded(self, optimizer: Optimizer) -> None:
        self._state.adopt()
        self._plan = _Plan(None, [], None)


def _nothing(optimizer: Optimizer) -> None:
    """What a hook does whose step is gone."""


def _is_watched(optimizer: Optimizer) -> bool:
    """Whether step hooks or a profiler must hear of a step; calling nobody would take longer than deciding."""
    hooks: list[Any] = [
        [hook for hook in optimizer._optimizer_step_pre_hooks.values() if not getattr(hook, "only_looks", False)],
        optimizer._optimizer_step_post_hooks,
        optimizer_module._global_optimizer_pre_hooks,
        optimizer_module._global_optimizer_post_hooks,
    ]
    return any(hooks) or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


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
