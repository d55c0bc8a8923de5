"""Flat homes for what an optimizer step touches: parameters, their moments and their step counts.

The user's optimizer keeps its own state dictionary, in torch's format; its tensors are views of these
buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from colonnade.errors import GradientError
from colonnade.optim.blocks import to_device
from colonnade.parallel.flat import FlatLayout, Span


def pinned(numbers: Tensor) -> Tensor:
    """The same, where the device can fetch them while the host goes on."""
    return numbers.pin_memory()


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
