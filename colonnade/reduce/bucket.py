"""Buckets: gradients that are summed together, lying one after another in flat memory.

`.grad` is a view of the bucket: either autograd adds into it, or a gradient is moved there once per backward.
Nothing is copied out, and later micro-batches accumulate in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter, eq, is_

import torch
from torch import Tensor

from colonnade.parallel.dtensor import local_part
from colonnade.parallel.flat import ALIGN_BYTES, FlatLayout
from colonnade.parallel.placement import is_dtensor
from colonnade.reduce.buffer import Buffer, GradientShard, OwnedSpan
from colonnade.reduce.records import Sum
from colonnade.reduce.transports.base import Transport

_GRAD, _VERSION = attrgetter("grad"), attrgetter("_version")

LARGE_BYTES = 256 << 10
"""A gradient from this size on is worth a hook of its own on the CPU."""

TAIL = 8
"""Elements that a bucket has at least after its gradients: for numbers that ride along."""
MISSING = 1
"""No gradient on this rank (and zeros in its place in the bucket, if it has one)."""
OUTSIDE = 2
"""A dense gradient beside the bucket: it came late, or the parameter has no bucket yet."""
SPARSE = 4
"""A sparse gradient."""
FROZEN = 8
"""The parameter does not require a gradient on this rank."""
FAILED = 16
"""Backward failed on this rank, so its gradients are worth nothing. Noted at the first parameter of a sum."""


class Bucket:
    """Parameters, the flat memory of their gradients, the range of it that this rank owns, and how far this step is.

    `numel` is that of `layout` and the padding that makes it divisible among the ranks; padding is zero and stays
    zero. `own` is all of it, or with a sharded sum this rank's slice, of which `spans` says whose elements it has
    and `shard` has the final gradient. `absent` are the parameters that no rank had a gradient for at the last step.
    `positions` are the parameters' places in the sum.

    On the CPU a small gradient is added into its view by autograd itself (the view is offered as zeros), and one
    that is at least `LARGE_BYTES` is moved by a hook while it is in the cache: each is the cheaper way for its
    size. On an accelerator a full bucket is moved at once. Every view has a version counter of its own, which a
    write raises: that is how the bucket knows which gradients have come without a hook on each parameter.
    """

    shard: GradientShard | None = None
    transport: Transport
    buffer: Buffer
    _offers: bool
    _released: bool
    _missing: dict[int, int]

    def __init__(self, sum_: Sum, positions: Sequence[int], index: int) -> None:
        small, self.large = _by_size(sum_, positions)
        self.sum = sum_
        self.positions = (*small, *self.large)
        self.names = tuple(sum_.names[i] for i in self.positions)
        self.parameters = tuple(sum_.parameters[i] for i in self.positions)
        self.layout = FlatLayout([local_part(parameter) for parameter in self.parameters])
        step = len(sum_.ranks) * (ALIGN_BYTES // self.layout.dtype.itemsize)
        tail = TAIL * (len(sum_.ranks) > 1 and sum_.sharding is None)
        self.numel = -(-(self.layout.numel + tail) // step) * step
        self.own = slice(0, self.numel)
        if sum_.sharding is not None:
            width = self.numel // len(sum_.ranks)
            self.own = slice(index * width, (index + 1) * width)
        self.spans = self._owned_spans()
        self.used = len(range(self.layout.numel)[self.own])
        self.buffers: list[Buffer] = []
        self.views: list[Tensor] = []
        self.grads: list[Tensor] = []
        self._expected_grads: list[Tensor | None] = []
        self.started = self.full = self.recording = False
        self.firings = self.left = 1
        self.last = 0
        self.absent: frozenset[int] = frozenset()
        self.expected: Sequence[int] = range(len(self.parameters))
        self._small = len(small)
        self._is_ready = False
        self._nothing_offered = [-1] * len(self.parameters)
        self._offered = self._nothing_offered
        self._versions: list[int] = []
        self._divided: set[int] = set()

    # -- memory -------------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        return self.sum.sharding is not None

    @property
    def keeps_gradients(self) -> bool:
        """Whether it has memory of its own; else it takes turns with others in some, once it is full."""
        return self.sum.sharding is None or self.sum.sharding.keep_whole

    @property
    def every_pass(self) -> bool:
        """Whether it is summed at every backward pass, not once a step."""
        return self.sum.sharding is not None and self.sum.sharding.every_pass

    @property
    def carries(self) -> bool:
        """Whether numbers can ride behind its gradients."""
        return self.shard is None and self.transport.carries

    @property
    def carries_counts(self) -> bool:
        """Whether counts of losses can: these are large."""
        return self.carries and self.layout.dtype in (torch.float32, torch.float64)

    @property
    def gradient(self) -> Tensor:
        """The final gradient of what this rank owns."""
        if self.shard is not None:
            return self.shard.flat
        return self.buffer.flat[: self.layout.numel]

    def use(self, buffer: Buffer) -> None:
        """Lie in this one of its buffers."""
        self.buffer = buffer
        self.transport = buffer.transport
        self.views, self.grads = buffer.views, buffer.grads
        self._offers = (
            self.keeps_gradients
            and self.layout.device.type == "cpu"
            and not any(is_dtensor(parameter) for parameter in self.parameters)
        )
        self._expected_grads = list(self.grads)

    # -- a backward pass ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """A backward pass is about to run: views of small gradients are offered, unless they are still."""
        self.full, self.left = False, self.firings
        if self.keeps_gradients and not self.buffer.is_whole:
            self.buffer.look(self)
            self.use(self.buffer)
        if self._may_offer() and not (self._is_ready and self._first_attached()):
            self._offer()
        if self.transport.early and self.keeps_gradients:
            self._versions = [view._version for view in self.views]

    def move(self, indices: Iterable[int]) -> None:
        """Bring these gradients into the buffer, where they are not there already."""
        sources, targets = [], []
        for i in indices:
            parameter, own = self.parameters[i], self.grads[i]
            grad = parameter.grad
            if grad is None or grad is own or grad.layout is not torch.strided:
                continue
            sources.append(local_part(grad, parameter))
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
        if index in self._divided:
            view.add_(grad, alpha=1.0 / self.sum.divisor)
        elif last and self._divides():
            torch.mul(grad, 1.0 / self.sum.divisor, out=view)
            self._divided.add(index)
            self._expected_grads[index] = None
        else:
            self.move([index])
            return
        parameter.grad = None

    def is_complete(self) -> bool:
        """Whether every gradient that is expected has come in this pass. More may still be added to one of them: that
        is then late, and found in `wait`."""
        if not self.keeps_gradients:
            return all(self.parameters[i].grad is not None for i in self.expected)
        if not (self._is_ready or self._all_attached()):
            self.move(range(len(self.parameters)))
        return (
            len(self._versions) > 0  # empty where `begin` was not called, or starting early is of no use
            and all(self.parameters[i].grad is self._expected_grads[i] for i in self.expected)
            and not any(self.views[i]._version == self._versions[i] for i in self.expected)
        )

    def written(self) -> list[tuple[Tensor | None, int | None]]:
        """Which tensors the gradients are, and how often each was written to."""
        return [(grad, getattr(grad, "_version", None)) for grad in map(_GRAD, self.parameters)]

    # -- its sum ------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Begin the sum of what was collected."""
        self._divide_rest()
        self.transport.start()

    @property
    def tail(self) -> Tensor:
        """Numbers that are summed with the gradients, and are none."""
        return self._flat[self.layout.numel : self.layout.numel + TAIL]

    def collect(self, *, early: bool) -> dict[int, int]:
        """Have all gradients in the buffer, with zeros for those that are missing or sparse.

        In backward (`early`), and with little memory always, `.grad` is None from now on: what comes late cannot
        hit the buffer. Returns position in the sum -> note, for gradients that are not in the bucket.
        """
        notes = self._complete() if self.keeps_gradients else self._take_all()
        self.started, self._missing = True, notes
        self._released = early or not self.keeps_gradients
        if self._released:
            for position, parameter in zip(self.positions, self.parameters, strict=True):
                if notes.get(position) != SPARSE:
                    parameter.grad = None
        return notes

    def finish(self, factor: float | Tensor) -> None:
        """End the sum: what this rank owns is the sum over the ranks, divided, and multiplied by `factor`."""
        if not self._divides():
            factor = factor / self.sum.divisor
        self.transport.finish(factor)
        if self.shard is not None:
            self.shard.landed = True
        self._offered, self._is_ready = self._nothing_offered, False
        if not self.is_sharded:
            for i in range(len(self.parameters)) if self._released else self._divided:
                if self.parameters[i].grad is None and self.positions[i] not in self._missing:
                    self.attach(i)
        if self._divided:
            self._divided, self._expected_grads = set(), list(self.grads)

    def rescale(self, factor: float | Tensor) -> None:
        """Multiply what this rank owns, of a sum that has ended."""
        self.gradient.mul_(factor.to(self.gradient) if isinstance(factor, Tensor) else factor)

    def attach(self, index: int) -> None:
        """Make `.grad` of one parameter its view of the buffer."""
        self.parameters[index].grad = self.grads[index]

    # -- inside -------------------------------------------------------------------------------------------

    def _owned_spans(self) -> list[OwnedSpan]:
        spans = []
        for index, span in enumerate(self.layout.spans):
            start, stop = max(span.start, self.own.start), min(span.stop, self.own.stop)
            if start < stop:
                spans.append(OwnedSpan(index, start - span.start, stop - span.start, start - self.own.start))
        return spans

    def _may_offer(self) -> bool:
        # Not while recording: autograd would add a sparse gradient to the dense view, and nobody would know.
        return self._offers and self._small > 0 and not self.recording

    def _offer(self) -> None:
        self._is_ready = True
        absent = [i for i, parameter in enumerate(self.parameters[: self._small]) if parameter.grad is None]
        if not absent:
            return
        if len(absent) == self._small:
            self._small_flat().zero_()
        else:
            torch._foreach_zero_([self.views[i] for i in absent])
        self._offered = list(self._offered)
        for i in absent:
            self.parameters[i].grad = grad = self.grads[i]
            self._offered[i] = grad._version

    def _first_attached(self) -> bool:
        """A sample, to spare a look at all parameters: a wrong guess costs a move, never a wrong gradient."""
        return next(map(is_, map(_GRAD, self.parameters), self.grads))

    @property
    def _flat(self) -> Tensor:
        return self.buffer.flat

    def _small_flat(self) -> Tensor:
        return self._flat[: self.layout.spans[self._small - 1].stop]

    def _divides(self) -> bool:
        return self.transport.divides and self._offers and self.sum.divisor != 1.0

    def _divide_rest(self) -> None:
        """Divide what `move_large` has not."""
        if not self._divides():
            return
        factor = 1.0 / self.sum.divisor
        if not self._divided:
            self.gradient.mul_(factor)
            return
        if self._small:
            self._small_flat().mul_(factor)
        for i in range(self._small, len(self.views)):
            if i not in self._divided:
                self.views[i].mul_(factor)

    def _complete(self) -> dict[int, int]:
        """Bring in whatever has come by itself, and zeros for what has not; notes about the latter."""
        if self._all_here():
            return {}
        notes = {}
        astray = []
        for i, (parameter, expected) in enumerate(zip(self.parameters, self._expected_grads, strict=True)):
            grad = parameter.grad
            if grad is expected:
                if grad is not None and self._offered[i] == grad._version:
                    parameter.grad = None
                    notes[self.positions[i]] = MISSING
            elif i in self._divided:
                self.move_large(i, last=True)
            elif grad is not None and grad.layout is torch.strided:
                astray.append(i)
            else:
                self.views[i].zero_()
                notes[self.positions[i]] = MISSING if grad is None else SPARSE
        self.move(astray)
        return notes

    def _take_all(self) -> dict[int, int]:
        """Copy all gradients into a buffer that was another bucket's before, and let go of them."""
        notes, sources, targets, empty = {}, [], [], self.layout.gaps(self._flat)
        for i, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            grad = parameter.grad
            if grad is not None and grad.layout is torch.strided:
                sources.append(local_part(grad, parameter))
                targets.append(view)
            else:
                notes[self.positions[i]] = MISSING if grad is None else SPARSE
                empty.append(view)
        if empty:
            torch._foreach_zero_(empty)
        if sources:
            torch._foreach_copy_(targets, sources)
        return notes

    def _all_here(self) -> bool:
        return self._all_attached() and not any(map(eq, map(_VERSION, self.grads), self._offered))

    def _all_attached(self) -> bool:
        return all(map(is_, map(_GRAD, self.parameters), self._expected_grads))

    def __str__(self) -> str:
        shown = ", ".join(self.names[:3]) + (f", ... ({len(self.names)})" if len(self.names) > 3 else "")
        dtype = str(self.layout.dtype).removeprefix("torch.")
        return (
            f"{self.layout.numel} x {dtype} over ranks {list(self.sum.ranks)} / {self.sum.divisor:g} "
            f"by {self.transport.name}: {shown}"
        )


def _by_size(sum_: Sum, positions: Sequence[int]) -> tuple[list[int], list[int]]:
    """The positions of small and of large parameters; all count as small where no hook moves them singly."""
    small: list[int] = []
    large: list[int] = []
    single = sum_.sharding is None or sum_.sharding.keep_whole
    for position in positions:
        parameter = sum_.parameters[position]
        is_large = single and parameter.device.type == "cpu" and parameter.nbytes >= LARGE_BYTES
        (large if is_large else small).append(position)
    return small, large
