"""Buckets: gradients that are reduced together, lying one after another in one piece of memory.

A gradient is moved into its bucket once per backward, and from then on `.grad` is a view of the bucket:
nothing is copied out, and later micro-batches accumulate in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from colonnade.engine.gradient_handler._options import GroupReduction
from colonnade.parallel.flat import ALIGN_BYTES, FlatLayout

_PART_BYTES = 1 << 20
"""On the CPU a part of this size is moved while the gradients are still in the cache."""


class Task(Protocol):
    """How one bucket is reduced. `start` may return before anything is sent, `finish` returns when it is done.

    `early` says whether starting before the end of backward is of use. `finish` multiplies by `factor`.
    """

    early: bool

    def start(self) -> None: ...

    def finish(self, factor: float | Tensor) -> None: ...


class Part:
    """Neighbours in a bucket that are moved together, when the last of them has its gradient.

    `firings` is how often that gradient comes in one backward, `left` how often it is still to come.
    """

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.firings = 1
        self.left = 1


class Bucket:
    """Parameters, the flat memory of their gradients, and how far this step has got with them.

    `buffer` has the offsets of `layout`; `room` is `buffer` with the padding that makes it divisible among
    the ranks. `positions` are the parameters' places in `reduction`. Padding is zero and stays zero.
    """

    task: Task

    def __init__(self, reduction: GroupReduction, positions: Sequence[int]) -> None:
        self.reduction = reduction
        self.positions = tuple(positions)
        self.names = tuple(reduction.names[i] for i in positions)
        self.parameters = tuple(reduction.parameters[i] for i in positions)
        self.layout = FlatLayout([local(parameter) for parameter in self.parameters])
        step = len(reduction.ranks) * max(1, ALIGN_BYTES // self.layout.dtype.itemsize)
        self.numel = -(-self.layout.numel // step) * step
        on_cpu = self.layout.device.type == "cpu"
        self.parts = _parts(self.layout) if on_cpu else [Part(0, len(positions))]
        self.started = False
        self.full = False
        self.version = 0

    def place(self, room: Tensor) -> None:
        """Lie in `room`, which has `numel` elements."""
        self.room = room
        self.buffer = room[: self.layout.numel]
        self.views = self.layout.views(self.buffer)
        self.grads = [_like(view, parameter) for view, parameter in zip(self.views, self.parameters, strict=True)]
        self.begin()

    def begin(self) -> None:
        """A backward pass is about to run."""
        self.full = False
        self.version = self.buffer._version
        for part in self.parts:
            part.left = part.firings

    def move(self, start: int, stop: int) -> None:
        """Bring the gradients [start, stop) into the buffer, where they are not there already."""
        sources, targets = [], []
        for i in range(start, stop):
            parameter, view = self.parameters[i], self.grads[i]
            grad = parameter.grad
            if grad is None or grad is view or grad.layout is not torch.strided:
                continue
            sources.append(local(grad, parameter))
            targets.append(self.views[i])
            parameter.grad = view
        if sources:
            torch._foreach_copy_(targets, sources)

    def arrived(self) -> bool:
        """Whether, by all signs, every gradient of this backward is here.

        Each arrival writes one view, and all views share the buffer's version counter. It may err when one
        parameter arrives twice and another not at all; the reducer then finds a late gradient and adds it.
        """
        return self.buffer._version - self.version >= len(self.parameters)

    def start(self) -> None:
        """Begin the reduction. `.grad` is None until `attach`, so that a late gradient cannot hit the buffer."""
        self.started = True
        for parameter in self.parameters:
            parameter.grad = None
        self.task.start()

    def attach(self, index: int) -> None:
        """Make `.grad` of one parameter its view of the buffer."""
        self.parameters[index].grad = self.grads[index]


def local(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """The part of a DTensor that this rank holds, placed as `like` is; a plain tensor as it is."""
    if not hasattr(tensor, "to_local"):
        return tensor
    placed: Any = tensor if like is None else tensor.redistribute(placements=like.placements)  # type: ignore[attr-defined]
    return placed.to_local().detach()


def fill(reduction: GroupReduction, order: Iterable[int], cap: float, first: float) -> list[Bucket]:
    """Cut the parameters at the positions in `order` into buckets of at most `cap` bytes.

    A bucket has at least one parameter, and the first takes `first` bytes, so that communication starts early.
    """
    buckets: list[Bucket] = []
    taken: list[int] = []
    room = min(first, cap)
    for position in order:
        nbytes = local(reduction.parameters[position]).nbytes
        if taken and nbytes > room:
            buckets.append(Bucket(reduction, taken))
            taken, room = [], cap
        taken.append(position)
        room -= nbytes
    return [*buckets, Bucket(reduction, taken)] if taken else buckets


def _parts(layout: FlatLayout) -> list[Part]:
    step = max(1, _PART_BYTES // layout.dtype.itemsize)
    parts, start = [], 0
    for i, span in enumerate(layout.spans):
        if span.stop - layout.spans[start].start >= step or i == len(layout) - 1:
            parts.append(Part(start, i + 1))
            start = i + 1
    return parts


def _like(view: Tensor, parameter: nn.Parameter) -> Tensor:
    """What `.grad` of the parameter is set to: the view, as a DTensor where the parameter is one."""
    if not hasattr(parameter, "to_local"):
        return view
    placed: Any = parameter
    return placed.from_local(
        view, placed.device_mesh, placed.placements, run_check=False, shape=placed.shape, stride=placed.stride()
    )
