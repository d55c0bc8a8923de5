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

    `early` says whether starting before the end of backward is of use, `divided` whether the task wants the
    gradients divided already (it costs nothing while they are moved). `finish` multiplies the sum by `factor`.
    """

    early: bool
    divided: bool

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
        self.recording = True
        self.firings = self.left = 1
        self._small = len(small)
        self._is_ready = self._is_whole = False
        self._nothing_offered = [-1] * len(self.parameters)
        self._offered = self._nothing_offered
        self._versions: list[int] = []
        self._banked: set[int] = set()

    def place(self, room: Tensor) -> None:
        """Lie in `room`, which has `numel` elements."""
        self.room = room
        self.buffer = room[: self.layout.numel]
        # `.data` is what gives a view its own version counter.
        self.views = [view.data for view in self.layout.views(self.buffer)]
        self.grads = [_like(view, parameter) for view, parameter in zip(self.views, self.parameters, strict=True)]
        self._offers = self.layout.device.type == "cpu" and not any(_is_dtensor(p) for p in self.parameters)
        self._expected: list[Tensor | None] = list(self.grads)

    def begin(self) -> None:
        """A backward pass is about to run: views of small gradients are offered, unless they are still."""
        self.full, self.left = False, self.firings
        if self._may_offer() and not (self._is_ready and self._first_attached()):
            self._offer()
        if self.task.early:
            self._versions = [view._version for view in self.views]

    def forget(self) -> None:
        """Let go of all gradients."""
        self._empty_bank()
        for parameter in self.parameters:
            parameter.grad = None

    def zero(self) -> None:
        """Let go of large gradients, and zero the small ones in one go where they may be offered."""
        self._empty_bank()
        kept = self._small if self._may_offer() else 0
        for parameter in self.parameters[kept:]:
            parameter.grad = None
        if kept:
            self._small_buffer().zero_()
            if not (self._is_whole and self._first_attached()):
                for i in range(kept):
                    self.attach(i)
            self._offered = [*map(_VERSION, self.grads[:kept]), *self._nothing_offered[kept:]]
            self._is_ready = True

    def _may_offer(self) -> bool:
        # Not while recording: autograd would add a sparse gradient to the dense view, and nobody would know.
        return self._offers and self._small > 0 and not self.recording

    def _offer(self) -> None:
        self._is_ready = True
        absent = [i for i, parameter in enumerate(self.parameters[: self._small]) if parameter.grad is None]
        if not absent:
            return
        if len(absent) == self._small:
            self._small_buffer().zero_()
        else:
            torch._foreach_zero_([self.views[i] for i in absent])
        self._offered = list(self._offered)
        for i in absent:
            self.parameters[i].grad = grad = self.grads[i]
            self._offered[i] = grad._version

    def _first_attached(self) -> bool:
        """A sample, to spare a look at all parameters: a wrong guess costs a move, never a wrong gradient."""
        return self.parameters[0].grad is self.grads[0]

    def _small_buffer(self) -> Tensor:
        return self.buffer[: self.layout.spans[self._small - 1].stop]

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

    def move_large(self, index: int, last: bool) -> None:
        """A large gradient has come: take it in, and in the last pass divide it on the way where that is wanted.

        A divided one has `.grad` None until `finish`, so that what comes on top of it is divided too.
        """
        parameter, view = self.parameters[index], self.views[index]
        grad = parameter.grad
        if grad is None or grad is self.grads[index] or grad.layout is not torch.strided:
            return
        if index in self._banked:
            view.add_(grad, alpha=1.0 / self.reduction.divisor)
        elif last and self._divides():
            torch.mul(grad, 1.0 / self.reduction.divisor, out=view)
            self._banked.add(index)
            self._expected[index] = None
        else:
            self.move([index])
            return
        parameter.grad = None

    def _divides(self) -> bool:
        return self.task.divided and self._offers and self.reduction.divisor != 1.0

    def _divide_rest(self) -> None:
        """Divide what `move_large` has not."""
        if not self._divides():
            return
        factor = 1.0 / self.reduction.divisor
        if not self._banked:
            self.room.mul_(factor)
            return
        if self._small:
            self._small_buffer().mul_(factor)
        for i in range(self._small, len(self.views)):
            if i not in self._banked:
                self.views[i].mul_(factor)

    def fill_up(self) -> bool:
        """Bring in whatever has come by itself; whether every parameter has got a gradient since `begin`.

        More may still be added to one of them: that is then late, and found in `wait`.
        """
        if not (self._is_ready or self._all_attached()):
            self.move(range(len(self.parameters)))
        return self.task.early and self._all_attached() and not any(map(eq, map(_VERSION, self.views), self._versions))

    def start_late(self) -> dict[int, int]:
        """Begin the reduction after backward, with zeros for gradients that are missing or sparse.

        Position in the reduction -> note, for these.
        """
        notes = self._gather()
        self._divide_rest()
        self.task.start()
        return notes

    def _gather(self) -> dict[int, int]:
        self._is_whole = self._all_here()
        if self._is_whole:
            return {}
        notes = {}
        astray = []
        for i, (parameter, expected) in enumerate(zip(self.parameters, self._expected, strict=True)):
            grad = parameter.grad
            if grad is expected:
                if grad is not None and self._offered[i] == grad._version:
                    parameter.grad = None
                    notes[self.positions[i]] = MISSING
            elif i in self._banked:
                self.move_large(i, last=True)
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
        return all(map(is_, [parameter.grad for parameter in self.parameters], self._expected))

    def start_early(self) -> None:
        """Begin the reduction in backward. `.grad` is None until `finish`: a late gradient cannot hit the buffer."""
        self.started = self._is_whole = True
        for parameter in self.parameters:
            parameter.grad = None
        self._divide_rest()
        self.task.start()

    def finish(self, scale: float | Tensor | None) -> None:
        """End the reduction: the buffer has the sum over the ranks, divided, and multiplied by `scale`."""
        factor = 1.0 if self._divides() else 1.0 / self.reduction.divisor
        self.task.finish(factor if scale is None else factor * scale)
        self._offered, self._is_ready = self._nothing_offered, False
        for i in range(len(self.parameters)) if self.started else self._banked:
            if self.parameters[i].grad is None:
                self.attach(i)
        self._empty_bank()
        self.started = False

    def _empty_bank(self) -> None:
        if self._banked:
            self._banked, self._expected = set(), list(self.grads)

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
