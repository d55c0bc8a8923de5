"""Buckets: gradients that are summed together, lying one after another in flat memory.

`.grad` is a view of the bucket: either autograd adds into it, or a gradient is moved there once per backward.
Nothing is copied out, and later micro-batches accumulate in place. A `Bucket` lies in a `Buffer`, which a `BucketStorage` allocates;
a sharded one has its result in a `GradientShard`, and its parameters in `BucketValues`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, eq, is_

import torch
from torch import Tensor

from colonnade.comm.rank_group import GroupMemory, RankGroup, allocate
from colonnade.gradients.sums import HALVES, Sum
from colonnade.gradients.transport import TRANSPORTS, Transport, is_one
from colonnade.parallel.dtensor import as_dtensor, local_part
from colonnade.parallel.flat import ALIGN_BYTES, FlatLayout, flattened
from colonnade.parallel.placement import is_dtensor

# --- Memory: of all gradients of a bucket, and of the slice that a rank owns ---


class Buffer:
    """Memory that the gradients of a bucket lie in: all of it (`flat`), and a view per parameter."""

    def __init__(self, bucket: Bucket, memory: GroupMemory) -> None:
        self.memory = memory
        self.flat = memory.own
        self.look(bucket)
        self.transport: Transport

    def look(self, bucket: Bucket) -> None:
        """Make the views; anew after somebody has given one other memory, as `Module.to` does with all gradients."""
        # `.data` is what gives a view its own version counter.
        self.views = [view.data for view in bucket.layout.views(self.flat[: bucket.layout.numel])]
        pairs = zip(self.views, bucket.parameters, strict=True)
        self.grads = [
            as_dtensor(view, like) if is_dtensor(like) else view for view, like in pairs
        ]  # what `.grad` is set to
        self._pointers = [view.data_ptr() for view in self.views]

    @property
    def is_whole(self) -> bool:
        """Whether all views are of this memory still."""
        return [view.data_ptr() for view in self.views] == self._pointers


@dataclass(frozen=True)
class OwnedSpan:
    """Elements [start, stop) of the parameter at `index`, in memory order; at [at, ...) of the owned slice."""

    index: int
    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class GradientShard:
    """The final gradient of the slice of a bucket that this rank owns."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.landed = False

    def land(self, total: Tensor, factor: float | Tensor, start: int = 0) -> None:
        """Put factor x `total` into it from `start` on, on top of what earlier passes of the step brought."""
        into = self.flat[start : start + total.numel()]
        wider = total.dtype.itemsize > into.dtype.itemsize  # a sum may be too large for what is narrower; a mean is not
        if wider or (isinstance(factor, Tensor) and total.device != into.device):
            # A factor that a device made is there.
            total, factor = (total if wider else total.to(into.dtype)) * factor, 1.0
        if self.landed:
            total = total.to(into.device, into.dtype)
            into.add_(total, alpha=factor) if isinstance(factor, float) else into.add_(total * factor)
        elif total.device == into.device and total.dtype == into.dtype:
            torch.mul(total, factor, out=into)
        else:
            into.copy_(total)
            if not is_one(factor):
                into.mul_(factor)


_GRAD, _VERSION = attrgetter("grad"), attrgetter("_version")

LARGE_BYTES = 256 << 10
"""A gradient below this size is offered its view on the CPU: adding to it costs less there than moving a tensor."""

TAIL = 8
"""Elements that a bucket has at least after its gradients: for piggybacked numbers."""
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

    Gradients are moved into the buffer at once when the bucket is full. On the CPU a small gradient is added into its view by
    autograd itself (the view is offered as zeros), which saves 6 to 7% of the time of a step of 400 small layers. Every view has a
    version counter of its own, which a write raises: so the bucket knows which gradients have come without a hook on each.
    """

    shard: GradientShard | None = None
    transport: Transport
    buffer: Buffer
    _offers: bool
    _released: bool
    _missing: dict[int, int]

    def __init__(self, sum_: Sum, positions: Sequence[int], index: int) -> None:
        small, large = _by_size(sum_, positions)
        self.sum = sum_
        self.positions = (*small, *large)  # in memory too, so that all offered views are made zero at once
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
        self.started = self.full = self.recording = False
        self.firings = self.left = 1
        self.last = 0
        self.absent: frozenset[int] = frozenset()
        self.expected: Sequence[int] = range(len(self.parameters))
        self._small = len(small)
        self._nothing_offered = [-1] * len(self.parameters)
        self._offered = self._nothing_offered
        self._versions: list[int] = []

    # -- memory -------------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        return self.sum.sharding is not None

    @property
    def keeps_gradients(self) -> bool:
        """Whether it has memory of its own; else it lies in a staging buffer, from when it is full until it is summed."""
        return self.sum.sharding is None or self.sum.sharding.keep_whole

    @property
    def every_pass(self) -> bool:
        """Whether it is summed at every backward pass, not once a step."""
        return self.sum.sharding is not None and self.sum.sharding.every_pass

    @property
    def carries(self) -> bool:
        """Whether numbers can be sent behind its gradients."""
        return self.shard is None and self.transport.carries

    @property
    def carries_counts(self) -> bool:
        """Whether counts of losses can: these are too large for a half-precision dtype."""
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

    # -- a backward pass ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """A backward pass is about to run: views of small gradients are offered, unless they are still."""
        self.full, self.left = False, self.firings
        if self.keeps_gradients and not self.buffer.is_whole:
            self.buffer.look(self)
            self.use(self.buffer)
        # Not while recording: autograd would add a sparse gradient to the dense view, and nobody would know.
        if self._offers and self._small > 0 and not self.recording:
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

    def move_arrived(self) -> None:
        """Bring in all gradients that have come, if the bucket has memory of its own for them."""
        if self.keeps_gradients and not self._all_attached():
            self.move(range(len(self.parameters)))

    def is_complete(self) -> bool:
        """Whether every gradient that is expected has come in this pass, and was brought in. More may still be added to one of
        them: that is then late, and found in `wait`."""
        if not self.keeps_gradients:
            return all(self.parameters[i].grad is not None for i in self.expected)
        return (
            len(self._versions) > 0  # empty where `begin` was not called, or starting early is of no use
            and all(self.parameters[i].grad is self.grads[i] for i in self.expected)
            and not any(self.views[i]._version == self._versions[i] for i in self.expected)
        )

    def written(self) -> list[tuple[Tensor | None, int | None]]:
        """Which tensors the gradients are, and how often each was written to."""
        return [(grad, getattr(grad, "_version", None)) for grad in map(_GRAD, self.parameters)]

    # -- its sum ------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Begin the sum of what was collected."""
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
        self.transport.finish(factor / self.sum.divisor)
        if self.shard is not None:
            self.shard.landed = True
        self._offered = self._nothing_offered
        if self._released and not self.is_sharded:
            for i, parameter in enumerate(self.parameters):
                if parameter.grad is None and self.positions[i] not in self._missing:
                    self.attach(i)

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

    def _offer(self) -> None:
        """Make `.grad` of small parameters their views, full of zeros, where it is None."""
        absent = [i for i, parameter in enumerate(self.parameters[: self._small]) if parameter.grad is None]
        if not absent:
            return
        if len(absent) == self._small:
            self._flat[: self.layout.spans[self._small - 1].stop].zero_()
        else:
            torch._foreach_zero_([self.views[i] for i in absent])
        self._offered = list(self._offered)
        for i in absent:
            self.parameters[i].grad = grad = self.grads[i]
            self._offered[i] = grad._version

    @property
    def _flat(self) -> Tensor:
        return self.buffer.flat

    def _complete(self) -> dict[int, int]:
        """Bring in whatever has come by itself, and zeros for what has not; notes about the latter."""
        if self._all_here():
            return {}
        notes = {}
        astray = []
        for i, (parameter, own) in enumerate(zip(self.parameters, self.grads, strict=True)):
            grad = parameter.grad
            if grad is own:
                if self._offered[i] == grad._version:
                    parameter.grad = None
                    notes[self.positions[i]] = MISSING
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
        return all(map(is_, map(_GRAD, self.parameters), self.grads))

    def __str__(self) -> str:
        shown = ", ".join(self.names[:3]) + (f", ... ({len(self.names)})" if len(self.names) > 3 else "")
        dtype = str(self.layout.dtype).removeprefix("torch.")
        return (
            f"{self.layout.numel} x {dtype} over ranks {list(self.sum.ranks)} / {self.sum.divisor:g} "
            f"by {self.transport.name}: {shown}"
        )


def _by_size(sum_: Sum, positions: Sequence[int]) -> tuple[list[int], list[int]]:
    """The positions of small and of large parameters; all count as small where no view is offered."""
    small: list[int] = []
    large: list[int] = []
    single = sum_.sharding is None or sum_.sharding.keep_whole
    for position in positions:
        parameter = sum_.parameters[position]
        is_large = single and parameter.device.type == "cpu" and parameter.nbytes >= LARGE_BYTES
        (large if is_large else small).append(position)
    return small, large


# --- Storage: one allocation for the buckets of a sum ---


_MB = 1 << 20
STAGING_BUFFERS = 2
"""Pieces of memory that are shared by the buckets that have none of their own: one is summed while the next is filled."""


class BucketStorage:
    """Memory for the buckets of one sum, dtype and device: one allocation for all, or two staging buffers that they share."""

    def __init__(self, sum_: Sum, group: RankGroup, dtype: torch.dtype, device: torch.device) -> None:
        self._sum, self._group = sum_, group
        self._dtype, self._device = dtype, device
        self._memory: list[GroupMemory] = []
        # One for all memory of the group: a signal says that one bucket is full, so no two may be waited for at once.
        self._under_way: deque[Bucket] = group.under_way
        self._next_staging = 0

    def lay_out(self, order: Sequence[int]) -> list[Bucket]:
        """Buckets for the parameters at these positions, in this order, with their memory and transport.

        Collective where the memory must grow; the same order on every rank.
        """
        options, transport = self._sum.options, self._transport(shared=True)
        sizes = [local_part(self._sum.parameters[position]).nbytes for position in order]
        cap, first = transport.sizes(sum(sizes) / _MB, self._group.size)
        cap, first = options.bucket_mb or cap, options.first_bucket_mb or first
        buckets = fill(self._sum, order, cap * _MB, first * _MB, self._group.index)
        keeps = all(bucket.keeps_gradients for bucket in buckets)
        self._reserve(
            *((1, sum(b.numel for b in buckets)) if keeps else (STAGING_BUFFERS, max(b.numel for b in buckets)))
        )
        transport = self._transport(shared=self._is_shared)
        start = 0
        for bucket in buckets:
            for memory in self._memory:
                bucket.buffers.append(Buffer(bucket, memory.part(start, start + bucket.numel)))
            start += bucket.numel * keeps
            if bucket.is_sharded:
                self._give_shard(bucket)
            for buffer in bucket.buffers:
                buffer.transport = transport(bucket, buffer.memory, self._group)
                bucket.use(buffer)
        return buckets

    def clear(self) -> None:
        """Zero this rank's memory: a new layout has its padding elsewhere."""
        for memory in self._memory:
            memory.own.zero_()

    def acquire_staging(self, bucket: Bucket) -> None:
        """Give a bucket without memory of its own the next staging buffer; first its last bucket must be summed on every rank."""
        # In shared memory the signal that a buffer is full says as well that the one before it is free.
        most = 1 if self._is_shared else len(self._memory)
        while len(self._under_way) >= most or bucket in self._under_way:  # of an earlier pass, in its other piece
            self._under_way.popleft().finish(1.0)
        bucket.use(bucket.buffers[self._next_staging % len(self._memory)])
        self._next_staging += 1
        self._under_way.append(bucket)

    def finish_staged(self) -> None:
        """End the sums of all buckets in staging buffers."""
        while self._under_way:
            self._under_way.popleft().finish(1.0)

    @property
    def _is_shared(self) -> bool:
        memory, *_ = self._memory
        return memory.every is not None

    def _transport(self, shared: bool) -> type[Transport]:
        shared = shared and self._sum.options.shared_memory is not False
        fitting = (one for one in TRANSPORTS if shared or not one.shares_memory)
        return next(one for one in fitting if one.serves(self._group, self._device))

    def _give_shard(self, bucket: Bucket) -> None:
        sharding = self._sum.sharding
        assert sharding is not None
        dtype = torch.float32 if sharding.wide and self._dtype in HALVES else self._dtype
        device = sharding.device or self._device
        if sharding.keep_whole and (dtype, device) == (self._dtype, self._device):
            (buffer,) = bucket.buffers
            bucket.shard = GradientShard(buffer.flat[bucket.own][: bucket.used])
        else:
            # What goes between the host and a device is fast only from pinned memory.
            pinned = device.type == "cpu" and self._device.type == "cuda"
            bucket.shard = GradientShard(torch.zeros(bucket.used, dtype=dtype, device=device, pin_memory=pinned))

    def _reserve(self, count: int, numel: int) -> None:
        if any(memory.own.numel() >= numel for memory in self._memory):
            return
        self._memory = []  # what is too small goes before its successor comes
        shared = self._transport(shared=True).shares_memory
        self._memory = [allocate(self._group, numel, self._dtype, self._device, shared) for _ in range(count)]


def fill(sum_: Sum, order: Iterable[int], cap: float, first: float, index: int) -> list[Bucket]:
    """Cut the parameters at the positions in `order` into buckets of at most `cap` bytes.

    A bucket has at least one parameter, and the first takes `first` bytes, so that communication starts early.
    """
    buckets: list[Bucket] = []
    taken: list[int] = []
    left = min(first, cap)
    for position in order:
        nbytes = local_part(sum_.parameters[position]).nbytes
        if taken and nbytes > left:
            buckets.append(Bucket(sum_, taken, index))
            taken, left = [], cap
        taken.append(position)
        left -= nbytes
    return [*buckets, Bucket(sum_, taken, index)] if taken else buckets


# --- Orders that all ranks agree on ---


def in_starting_order(sums: Iterable[Sequence[Bucket]]) -> list[Bucket]:
    """The buckets of several sums in the order in which they start.

    By how far through its sum a bucket ends (0 to 1), then by ranks: a key that all ranks of two groups agree on, whatever
    other sums each of them has.
    """
    ranked: list[tuple[tuple[float, tuple[int, ...]], Bucket]] = []
    for buckets in sums:
        total, done = max(1, sum(bucket.numel for bucket in buckets)), 0
        for bucket in buckets:
            done += bucket.numel
            ranked.append(((done / total, bucket.sum.ranks), bucket))
    return [bucket for _, bucket in sorted(ranked, key=lambda entry: entry[0])]


def last_over_ranks(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Of buckets in starting order the last over each set of ranks: these never start before backward has ended.

    Nothing is won by sending them a moment sooner, and as long as they are here, gradients that somebody changes by hand can
    be noticed.
    """
    return list({bucket.sum.ranks: bucket for bucket in buckets}.values())


# --- Parameters of a sharded bucket ---


class BucketValues:
    """The parameters of `bucket` in flat memory, with its offsets; `owned` is the slice that is stepped on.

    `owned` is part of the parameters themselves, or (another dtype or device, as `shard` has) a master copy of it.
    Collective: the memory is shared where it can be.
    """

    @torch.no_grad()
    def __init__(self, bucket: Bucket, group: RankGroup) -> None:
        self.bucket, self.group = bucket, group
        share, layout = bucket.transport.shares_memory, bucket.layout
        self.memory = allocate(group, bucket.numel, layout.dtype, layout.device, share)
        self._elsewhere: list[tuple[Tensor, Tensor, OwnedSpan | None]] = []
        spans = {span.index: span for span in bucket.spans}
        self._spans = [spans.get(index) for index in range(len(bucket.parameters))]
        views = bucket.layout.views(self.memory.own[: bucket.layout.numel])
        for parameter, view, span in zip(bucket.parameters, views, self._spans, strict=True):
            part = local_part(parameter)
            view.copy_(part)
            if is_dtensor(parameter):
                # What made it (FSDP2) knows where its elements lie: they stay there, and are copied in and out.
                self._elsewhere.append((part, view, span))
            else:
                parameter.data = view
        self._views = views
        shard = bucket.gradient
        self.has_master = (shard.dtype, shard.device) != (bucket.layout.dtype, bucket.layout.device)
        self.owned = self._own_part
        if self.has_master:
            self.owned = torch.empty_like(shard, pin_memory=shard.is_pinned()).copy_(self._own_part)
        self.parts = [self.owned[span.at : span.at + span.numel] for span in bucket.spans]
        self.grads = [shard[span.at : span.at + span.numel] for span in bucket.spans]

    @property
    def _own_part(self) -> Tensor:
        return self.memory.own[self.bucket.own][: self.bucket.used]

    @torch.no_grad()
    def refresh(self) -> None:
        """Take up what somebody wrote to the parameters since the last step, in whatever way: loaded weights, say.

        A parameter that was given other memory gets the bucket's back, with its values. A master copy keeps its
        digits wherever the parameter still is what the copy rounds to.
        """
        # Only what this rank owns: the rest comes from its owner, who may be sending it at this moment.
        for part, view, span in self._elsewhere:
            if span is not None:
                flattened(view)[span.start : span.stop].copy_(flattened(part)[span.start : span.stop])
        if not self._elsewhere:
            for parameter, view, span in zip(self.bucket.parameters, self._views, self._spans, strict=True):
                if parameter.data_ptr() != view.data_ptr():
                    if span is not None:
                        as_here = torch.empty_like(view).copy_(parameter)  # its elements may lie in another order
                        flattened(view)[span.start : span.stop].copy_(flattened(as_here)[span.start : span.stop])
                    parameter.data = view
        if self.has_master and self.bucket.used:
            now = self._own_part.to(self.owned.device)
            self.owned.copy_(torch.where(now == self.owned.to(now.dtype), self.owned, now.to(self.owned.dtype)))

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the stepped slice to this rank's parameters; the other ranks still have to be sent it."""
        if self.has_master:
            self._own_part.copy_(self.owned)

    @torch.no_grad()
    def copy_out(self) -> None:
        """The parameters of all ranks have come: bring them to those that lie elsewhere."""
        for part, view, _ in self._elsewhere:
            part.copy_(view)
