"""Buckets: gradients that are reduced together, lying one after another in one piece of memory.

`.grad` is a view of the bucket: either autograd adds into it, or a gradient is moved there once per backward.
Nothing is copied out, and later micro-batches accumulate in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter, eq, is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from colonnade.engine.gradient_handler._agreement import MISSING, SPARSE
from colonnade.engine.gradient_handler._options import GroupReduction
from colonnade.parallel.flat import ALIGN_BYTES, FlatLayout

_VERSION = attrgetter("_version")

LARGE_BYTES = 256 << 10
"""A gradient from this size on is worth a hook of its own on the CPU."""


class Task(Protocol):
    """How one bucket is reduced. `start` may return before anything is sent, `finish` returns when it is done.

    `early` says whether starting before the end of backward is of use. `finish` multiplies by `factor`.
    """

    early: bool

    def start(self) -> None: ...

    def finish(self, factor: float | Tensor) -> None: ...


class Bucket:
    """Parameters, the flat memory of their gradients, and how far this step has got with them.

    `buffer` has the offsets of `layout`; `room` is `buffer` with the padding that makes it divisible among
    the ranks. `positions` are the parameters' places in `reduction`. Padding is zero and stays zero.

    On the CPU a small gradient is added into its view by autograd itself (the view is offered as zeros), and one
    that is at least `LARGE_BYTES` is moved by a hook while it is in the cache: each is the cheaper way for its
    size. On an accelerator a full bucket is moved at once. Every view has a version counter of its own, which a
    write raises: that is how the bucket knows which gradients have come without a hook on each parameter.
    """

    task: Task

    def __init__(self, reduction: GroupReduction, positions: Sequence[int]) -> None:
        small, self.large = _by_size(reduction, positions)
        self.reduction = reduction
        self.positions = (*small, *self.large)
        self.names = tuple(reduction.names[i] for i in self.positions)
        self.parameters = tuple(reduction.parameters[i] for i in self.positions)
        self.layout = FlatLayout([local(parameter) for parameter in self.parameters])
        step = len(reduction.ranks) * max(1, ALIGN_BYTES // self.layout.dtype.itemsize)
        self.numel = -(-self.layout.numel // step) * step
        self.started = self.full = False
        self.firings = self.left = 1
        self._small = len(small)
        self._is_ready = self._is_whole = False
        self._nothing_offered = [-1] * len(self.parameters)
        self._offered = self._nothing_offered
        self._versions: list[int] = []

    def place(self, room: Tensor) -> None:
        """Lie in `room`, which has `numel` elements."""
        self.room = room
        self.buffer = room[: self.layout.numel]
        # `.data` is what gives a view its own version counter.
        self.views = [view.data for view in self.layout.views(self.buffer)]
        self.grads = [_like(view, parameter) for view, parameter in zip(self.views, self.parameters, strict=True)]
        self._offers = self.layout.device.type == "cpu" and not any(_is_dtensor(p) for p in self.parameters)

    def begin(self, offer: bool) -> None:
        """A backward pass is about to run; `offer` the views of small gradients. Call again for each pass."""
        self.full, self.left = False, self.firings
        if offer and self._offers and self._small and not (self._is_ready and self._first_attached()):
            self._offer()
        if self.task.early:
            self._versions = [view._version for view in self.views]

    def zero(self, offer: bool) -> None:
        """Forget all gradients, as `zero_grad` does; small ones are zeroed in one go where they may be offered."""
        kept = self._small if offer and self._offers else 0
        for parameter in self.parameters[kept:]:
            parameter.grad = None
        if kept:
            self._zero_small()
            if not (self._is_whole and self._first_attached()):
                for i in range(kept):
                    self.attach(i)
            self._offered = [*map(_VERSION, self.grads[:kept]), *self._nothing_offered[kept:]]
            self._is_ready = True

    def _offer(self) -> None:
        self._is_ready = True
        absent = [i for i, parameter in enumerate(self.parameters[: self._small]) if parameter.grad is None]
        if not absent:
            return
        if len(absent) == self._small:
            self._zero_small()
        else:
            torch._foreach_zero_([self.views[i] for i in absent])
        self._offered = list(self._offered)
        for i in absent:
            self.parameters[i].grad = grad = self.grads[i]
            self._offered[i] = grad._version

    def _first_attached(self) -> bool:
        """A sample, to spare a look at all parameters: a wrong guess costs a move, never a wrong gradient."""
        return self.parameters[0].grad is self.grads[0]

    def _zero_small(self) -> None:
        self.buffer[: self.layout.spans[self._small - 1].stop].zero_()

    def move(self, indices: Iterable[int]) -> None:
        """Bring these gradients into the buffer, where they are not there already."""
        sources, targets = [], []
        for i in indices:
            parameter, own = self.parameters[i], self.grads[i]
            grad = parameter.grad
            if grad is None or grad is own or grad.layout is not torch.strided:
                continue
            sources.append(local(grad, parameter))
            targets.append(self.views[i])
            parameter.grad = own
        if sources:
            torch._foreach_copy_(targets, sources)

    def fill_up(self) -> bool:
        """Bring in whatever has come by itself; whether every parameter has got a gradient since `begin`.

        More may still be added to one of them: that is then late, and found in `wait`.
        """
        if not (self._is_ready or self._all_attached()):
            self.move(range(len(self.parameters)))
        return self.task.early and self._all_attached() and not any(map(eq, map(_VERSION, self.views), self._versions))

    def gather(self) -> dict[int, int]:
        """Bring all gradients in; zeros stand for those that are missing or sparse. Position -> note on these."""
        self._is_whole = self._all_here()
        if self._is_whole:
            return {}
        notes = {}
        astray = []
        for i, (parameter, own) in enumerate(zip(self.parameters, self.grads, strict=True)):
            grad = parameter.grad
            if grad is own:
                if self._offered[i] == own._version:
                    parameter.grad = None
                    notes[self.positions[i]] = MISSING
            elif grad is not None and grad.layout is torch.strided:
                astray.append(i)
            else:
                self.views[i].zero_()
                notes[self.positions[i]] = MISSING if grad is None else SPARSE
        self.move(astray)
        return notes

    def _all_here(self) -> bool:
        return self._all_attached() and not any(map(eq, map(_VERSION, self.grads), self._offered))

    def _all_attached(self) -> bool:
        return all(map(is_, [parameter.grad for parameter in self.parameters], self.grads))

    def start(self) -> None:
        """Begin the reduction. `.grad` is None until `finish`, so that a late gradient cannot hit the buffer."""
        self.started = True
        for parameter in self.parameters:
            parameter.grad = None
        self.task.start()

    def finish(self, factor: float | Tensor) -> None:
        """End the reduction: what is in the buffer is summed and multiplied by `factor`."""
        self.task.finish(factor)
        self._offered, self._is_ready = self._nothing_offered, False

    def reattach(self) -> None:
        """After an early start: `.grad` is the view again, except where a late gradient stands in its place."""
        self.started, self._is_whole = False, True
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                self.attach(i)

    def attach(self, index: int) -> None:
        """Make `.grad` of one parameter its view of the buffer."""
        self.parameters[index].grad = self.grads[index]


def _by_size(reduction: GroupReduction, positions: Sequence[int]) -> tuple[list[int], list[int]]:
    """The positions of small and of large parameters; all count as small where no hook moves them singly."""
    small: list[int] = []
    large: list[int] = []
    for position in positions:
        parameter = reduction.parameters[position]
        single = parameter.device.type == "cpu" and parameter.nbytes >= LARGE_BYTES
        (large if single else small).append(position)
    return small, large


def local(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """The part of a DTensor that this rank holds, placed as `like` is; a plain tensor as it is."""
    if not _is_dtensor(tensor):
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


def _like(view: Tensor, parameter: nn.Parameter) -> Tensor:
    """What `.grad` of the parameter is set to: the view, as a DTensor where the parameter is one."""
    if not _is_dtensor(parameter):
        return view
    placed: Any = parameter
    return placed.from_local(
        view, placed.device_mesh, placed.placements, run_check=False, shape=placed.shape, stride=placed.stride()
    )


def _is_dtensor(tensor: Tensor) -> bool:
    # By what it can do, not by its class: importing that takes longer than all of this.
    return hasattr(tensor, "to_local")
