"""Buckets: gradients that are reduced together, stored one after another in flat memory.

`.grad` is a view of the bucket: either autograd accumulates into this view, or the gradient is copied into the bucket once per
backward pass. Nothing is copied out of the bucket, and later micro-batches accumulate in place.

- `Bucket`: the parameters, and the state of their reduction in this step.
- `Buffer`: the memory of a bucket, allocated by a `BucketStorage` for all buckets of a sum.
- `GradientShard`: the reduced gradient of a sharded bucket (ZeRO); `BucketValues`: the parameters of a bucket in flat memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, eq, is_

import torch
from torch import Tensor

from colonnade.comm.groups import GroupMemory, RankGroup, allocate
from colonnade.gradients.sums import HALVES, Sum
from colonnade.gradients.transport import TRANSPORTS, Transport, is_one
from colonnade.parallel.flat import ALIGN_BYTES, FlatLayout, flattened
from colonnade.parallel.placement import as_dtensor, is_dtensor, local_part

# --- Memory: of all gradients of a bucket, and of the slice that a rank owns ---


class Buffer:
    """Memory for the gradients of a bucket: a flat tensor, and one view of it per parameter."""

    def __init__(self, bucket: Bucket, memory: GroupMemory) -> None:
        self.memory = memory
        self.flat = memory.own
        self.look(bucket)
        self.transport: Transport

    def look(self, bucket: Bucket) -> None:
        """Create one view of the buffer for each parameter.

        Called again if other code has replaced the memory of a view, as `Module.to` does for gradients.
        """
        # `.data` gives each view a version counter of its own.
        self.views = [view.data for view in bucket.layout.views(self.flat[: bucket.layout.numel])]
        pairs = zip(self.views, bucket.parameters, strict=True)
        # The values of `.grad`: a view, or a DTensor around it.
        self.grads = [as_dtensor(view, like) if is_dtensor(like) else view for view, like in pairs]
        self._pointers = [view.data_ptr() for view in self.views]

    @property
    def is_whole(self) -> bool:
        """Whether all views still refer to the memory of this buffer."""
        return [view.data_ptr() for view in self.views] == self._pointers


@dataclass(frozen=True)
class OwnedSpan:
    """The elements [start, stop), in memory order, of the parameter at `index` of a bucket.

    In the owned slice they start at `at`.
    """

    index: int
    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class GradientShard:
    """The reduced gradient of the slice of a bucket that this rank owns."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.landed = False

    def land(self, total: Tensor, factor: float | Tensor, start: int = 0) -> None:
        """Store `factor` x `total` at position `start` of the shard; after an earlier backward pass of the step, add it to the
        shard instead."""
        into = self.flat[start : start + total.numel()]
        # Multiply before the copy in two cases. A sum may overflow a narrower dtype, the mean does not. And a factor computed
        # on a device is multiplied there, since the shard may be on the host (offload).
        wider = total.dtype.itemsize > into.dtype.itemsize
        if wider or (isinstance(factor, Tensor) and total.device != into.device):
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
"""On the CPU, the view of a smaller gradient is offered to autograd: accumulating into it costs less there than a copy."""

TAIL = 8
"""The least number of elements of a bucket after its gradients: room for piggybacked numbers."""

# A note is one byte per parameter and step: the ways in which its gradient did not arrive in the bucket.
MISSING = 1
"""No gradient on this rank (its place in the bucket, if it has one, is zero)."""
OUTSIDE = 2
"""A dense gradient outside the bucket: it arrived late, or the parameter has no bucket yet."""
SPARSE = 4
"""A sparse gradient."""
FROZEN = 8
"""The parameter does not require a gradient on this rank."""
FAILED = 16
"""Backward failed on this rank, so its gradients are unusable. Set at the first parameter of a sum."""


class Bucket:
    """Parameters that are reduced together: the flat memory of their gradients, the slice that this rank owns, and the state of
    the step.

    - `positions`: the indices of the bucket's parameters in the sum.
    - `numel`: elements of `layout`, and the padding that makes them divisible by the number of ranks. Padding stays zero.
    - `own`: the slice of the flat memory that this rank owns: all elements, unless the sum is sharded. If it is sharded, `spans`
      lists the elements of parameters in the slice, and `shard` has their reduced gradient.
    - `absent`: the parameters without a gradient on any rank in the last step.

    Gradients are copied into the buffer all at once when the bucket is full. On the CPU, autograd accumulates a small gradient
    into its view directly (the view is offered as `.grad`, full of zeros), which saves 6 to 7% of the time of a step of 400 small
    layers. Each view has its own version counter, which every write increments, so the bucket detects
    which gradients have arrived without a hook on each parameter.
    """

    shard: GradientShard | None = None
    transport: Transport
    buffer: Buffer
    _offers: bool
    _released: bool
    _missing: dict[int, int]

    def __init__(self, sum_: Sum, positions: Sequence[int], index: int) -> None:
        # Small parameters come first, in memory too, so that the offered views are zeroed by one operation. Where no views are
        # offered, all count as small.
        small: list[int] = []
        large: list[int] = []
        keeps_gradients = sum_.sharding is None or sum_.sharding.keep_full
        for position in positions:
            parameter = sum_.parameters[position]
            is_large = keeps_gradients and parameter.device.type == "cpu" and parameter.nbytes >= LARGE_BYTES
            (large if is_large else small).append(position)
        self.sum = sum_
        self.positions = (*small, *large)
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
        self.spans: list[OwnedSpan] = []
        for at, span in enumerate(self.layout.spans):
            start, stop = max(span.start, self.own.start), min(span.stop, self.own.stop)
            if start < stop:
                self.spans.append(OwnedSpan(at, start - span.start, stop - span.start, start - self.own.start))
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
        self._small_end = self.layout.spans[self._small - 1].stop if small else 0
        self._nothing_offered = [-1] * len(self.parameters)
        self._offered = self._nothing_offered
        self._versions: list[int] = []

    # -- memory -------------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        return self.sum.sharding is not None

    @property
    def keeps_gradients(self) -> bool:
        """Whether the bucket has its own memory.

        If not, it uses a staging buffer while it is full and not yet reduced.
        """
        return self.sum.sharding is None or self.sum.sharding.keep_full

    @property
    def every_pass(self) -> bool:
        """Whether the bucket is reduced at every backward pass, not only once per step."""
        return self.sum.sharding is not None and self.sum.sharding.every_pass

    @property
    def carries(self) -> bool:
        """Whether piggybacked numbers can be sent in the same collective, after the gradients of the bucket."""
        return self.shard is None and self.transport.carries

    @property
    def carries_counts(self) -> bool:
        """Whether loss counts can be piggybacked on this bucket. Buckets in half precision cannot represent them."""
        return self.carries and self.layout.dtype in (torch.float32, torch.float64)

    @property
    def gradient(self) -> Tensor:
        """The reduced gradient of the elements that this rank owns."""
        if self.shard is not None:
            return self.shard.flat
        return self.buffer.flat[: self.layout.numel]

    def use(self, buffer: Buffer) -> None:
        """Make `buffer`, one of `buffers`, the current buffer of the bucket."""
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
        """Prepare the bucket for a backward pass."""
        self.full, self.left = False, self.firings
        if self.keeps_gradients and not self.buffer.is_whole:
            self.buffer.look(self)
            self.use(self.buffer)

        # Offer the views of small gradients: autograd then accumulates into the bucket. The version of an offered view tells
        # later whether a gradient arrived. Not while recording: autograd would add a sparse gradient to the dense view, and it
        # would not be noticed as sparse.
        if self._offers and not self.recording:
            offered = [i for i, parameter in enumerate(self.parameters[: self._small]) if parameter.grad is None]
            if offered:
                if len(offered) == self._small:
                    self._flat[: self._small_end].zero_()
                else:
                    torch._foreach_zero_([self.views[i] for i in offered])
                self._offered = list(self._offered)
            for i in offered:
                self.parameters[i].grad = grad = self.grads[i]
                self._offered[i] = grad._version

        if self.transport.early and self.keeps_gradients:
            self._versions = [view._version for view in self.views]

    def move(self, indices: Iterable[int]) -> None:
        """Copy the gradients of the parameters at `indices` into the buffer, unless they already are views of the buffer."""
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
        """Copy all gradients that have arrived into the buffer, if the bucket has its own memory."""
        if self.keeps_gradients and not self._all_attached():
            self.move(range(len(self.parameters)))

    def is_complete(self) -> bool:
        """Whether every expected gradient has arrived in this pass and is in the buffer.

        Autograd may still accumulate into a gradient that has arrived. Such a late contribution is found in `Synchroniser.wait`.
        """
        if not self.keeps_gradients:
            return all(self.parameters[i].grad is not None for i in self.expected)
        return (
            len(self._versions)
            > 0  # empty if `begin` was not called, or the transport gains nothing from an early start
            and all(self.parameters[i].grad is self.grads[i] for i in self.expected)
            and not any(self.views[i]._version == self._versions[i] for i in self.expected)
        )

    def written(self) -> list[tuple[Tensor | None, int | None]]:
        """The present `.grad` of every parameter with its version counter, for a later comparison."""
        return [(grad, getattr(grad, "_version", None)) for grad in map(_GRAD, self.parameters)]

    # -- its sum ------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Start the reduction of the gradients that `collect` has put into the buffer."""
        self.transport.start()

    @property
    def tail(self) -> Tensor:
        """The elements of the buffer after the gradients.

        They hold piggybacked numbers, which are summed together with the gradients.
        """
        return self._flat[self.layout.numel : self.layout.numel + TAIL]

    def collect(self, *, early: bool) -> dict[int, int]:
        """Complete the buffer: copy all gradients that have arrived, and write zeros for gradients that are missing or sparse.

        After an early start (during backward), and with staging buffers always, `.grad` is None from now on, so that a late
        gradient cannot be accumulated into a buffer that is being sent.

        Returns:
            {position in the sum: note} for gradients that are not in the bucket.
        """
        notes: dict[int, int] = {}
        if not self.keeps_gradients:
            # The staging buffer has old contents of another bucket, so everything is written, padding included.
            sources, targets, empty = [], [], self.layout.gaps(self._flat)
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
        elif not self._all_attached() or any(map(eq, map(_VERSION, self.grads), self._offered)):
            # Not the usual case that every `.grad` is its view and was written to. A view that was offered and not written to is
            # a missing gradient, and becomes None, as in a single process.
            outside = []
            for i, (parameter, own) in enumerate(zip(self.parameters, self.grads, strict=True)):
                grad = parameter.grad
                if grad is own:
                    if self._offered[i] == grad._version:
                        parameter.grad = None
                        notes[self.positions[i]] = MISSING
                elif grad is not None and grad.layout is torch.strided:
                    outside.append(i)
                else:
                    self.views[i].zero_()
                    notes[self.positions[i]] = MISSING if grad is None else SPARSE
            self.move(outside)
        self.started, self._missing = True, notes
        self._released = early or not self.keeps_gradients
        if self._released:
            for position, parameter in zip(self.positions, self.parameters, strict=True):
                if notes.get(position) != SPARSE:
                    parameter.grad = None
        return notes

    def finish(self, factor: float | Tensor) -> None:
        """Finish the reduction.

        Afterwards the owned elements are the sum over the ranks, divided by the divisor and multiplied by `factor`.
        """
        self.transport.finish(factor / self.sum.divisor)
        if self.shard is not None:
            self.shard.landed = True
        self._offered = self._nothing_offered
        # `.grad` was released for sending. It is set again unless a late gradient has taken its place, which
        # `finish_uneven` adds, or there was none.
        if self._released and not self.is_sharded:
            for i, parameter in enumerate(self.parameters):
                if parameter.grad is None and self.positions[i] not in self._missing:
                    self.attach(i)

    def rescale(self, factor: float | Tensor) -> None:
        """Multiply the owned elements of a finished reduction by `factor`."""
        self.gradient.mul_(factor.to(self.gradient) if isinstance(factor, Tensor) else factor)

    def attach(self, index: int) -> None:
        """Set `.grad` of one parameter to its view of the buffer."""
        self.parameters[index].grad = self.grads[index]

    @property
    def _flat(self) -> Tensor:
        return self.buffer.flat

    def _all_attached(self) -> bool:
        """Whether every `.grad` is its view. Written with `map`: this runs for each parameter at every step."""
        return all(map(is_, map(_GRAD, self.parameters), self.grads))

    def __str__(self) -> str:
        shown = ", ".join(self.names[:3]) + (f", ... ({len(self.names)})" if len(self.names) > 3 else "")
        dtype = str(self.layout.dtype).removeprefix("torch.")
        return (
            f"{self.layout.numel} x {dtype} over ranks {list(self.sum.ranks)} / {self.sum.divisor:g} "
            f"by {self.transport.name}: {shown}"
        )


# --- Storage: one allocation for the buckets of a sum ---


_MB = 1 << 20
STAGING_BUFFERS = 2
"""Buffers shared by the buckets without memory of their own: one is reduced while the next is filled."""


class BucketStorage:
    """The memory for all buckets of one sum, dtype and device: either one allocation for all buckets, or two staging buffers
    that buckets share."""

    def __init__(self, sum_: Sum, group: RankGroup, dtype: torch.dtype, device: torch.device) -> None:
        self._sum, self._group = sum_, group
        self._dtype, self._device = dtype, device
        self._memory: list[GroupMemory] = []
        # One queue for all storages of a group: a signal means that one bucket is full and does not name it, so the ranks
        # must wait for the buckets in one order.
        self._under_way: deque[Bucket] = group.under_way
        self._next_staging = 0

    def lay_out(self, order: Sequence[int]) -> list[Bucket]:
        """Create buckets, with memory and transport, for the parameters at the positions in `order`, in this order.

        Collective over the ranks of the sum if the memory must grow. The order must be the same on all these ranks.
        """
        options, transport = self._sum.options, self._transport(shared=True)
        sizes = [local_part(self._sum.parameters[position]).nbytes for position in order]
        cap, first = transport.sizes(sum(sizes) / _MB, self._group.size)
        cap, first = options.bucket_mb or cap, options.first_bucket_mb or first
        buckets = fill(self._sum, order, cap * _MB, first * _MB, self._group.index)

        # Memory that suffices is kept. Memory that is too small is released before its successor is allocated, so that both
        # never exist at once.
        keeps = all(bucket.keeps_gradients for bucket in buckets)
        count, numel = (1, sum(b.numel for b in buckets)) if keeps else (STAGING_BUFFERS, max(b.numel for b in buckets))
        if not any(memory.own.numel() >= numel for memory in self._memory):
            self._memory = []
            shared = transport.shares_memory
            self._memory = [allocate(self._group, numel, self._dtype, self._device, shared) for _ in range(count)]

        # The transport is chosen again: the host may have had no room for shared memory.
        transport = self._transport(shared=self._is_shared)
        start = 0
        for bucket in buckets:
            for memory in self._memory:
                bucket.buffers.append(Buffer(bucket, memory.part(start, start + bucket.numel)))
            start += bucket.numel * keeps
            sharding = self._sum.sharding
            if sharding is not None:
                dtype = torch.float32 if sharding.wide and self._dtype in HALVES else self._dtype
                device = sharding.device or self._device
                if sharding.keep_full and (dtype, device) == (self._dtype, self._device):
                    (buffer,) = bucket.buffers
                    bucket.shard = GradientShard(buffer.flat[bucket.own][: bucket.used])
                else:
                    # Copies between host and GPU are fast only with pinned memory.
                    pinned = device.type == "cpu" and self._device.type == "cuda"
                    flat = torch.zeros(bucket.used, dtype=dtype, device=device, pin_memory=pinned)
                    bucket.shard = GradientShard(flat)
            for buffer in bucket.buffers:
                buffer.transport = transport(bucket, buffer.memory, self._group)
                bucket.use(buffer)
        return buckets

    def clear(self) -> None:
        """Zero this rank's memory before a new layout: its padding is at different positions and must be zero."""
        for memory in self._memory:
            memory.own.zero_()

    def acquire_staging(self, bucket: Bucket) -> None:
        """Assign the next staging buffer to a bucket without its own memory, after the reduction of the previous bucket in
        that buffer."""
        # In shared memory the signal "this buffer is full" also tells the other ranks that the previous one has been read.
        most = 1 if self._is_shared else len(self._memory)
        # The bucket itself may still be under way, from an earlier backward pass and in the other buffer.
        while len(self._under_way) >= most or bucket in self._under_way:
            self._under_way.popleft().finish(1.0)
        bucket.use(bucket.buffers[self._next_staging % len(self._memory)])
        self._next_staging += 1
        self._under_way.append(bucket)

    def finish_staged(self) -> None:
        """Finish the reductions of all buckets in staging buffers."""
        while self._under_way:
            self._under_way.popleft().finish(1.0)

    @property
    def _is_shared(self) -> bool:
        memory, *_ = self._memory
        return memory.every is not None

    def _transport(self, shared: bool) -> type[Transport]:
        shared = shared and self._sum.options.shared_memory is not False
        candidates = (transport for transport in TRANSPORTS if shared or not transport.shares_memory)
        return next(transport for transport in candidates if transport.serves(self._group, self._device))


def fill(sum_: Sum, order: Iterable[int], cap: float, first: float, index: int) -> list[Bucket]:
    """Distribute the parameters at the positions in `order` over buckets of at most `cap` bytes.

    The first bucket has at most `first` bytes, so that communication starts early. A bucket with a single parameter may be larger.
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


# --- Orders that are equal on all ranks ---


def in_starting_order(sums: Iterable[Sequence[Bucket]]) -> list[Bucket]:
    """The buckets of several sums in the order in which they start.

    The sort key of a bucket is the fraction of its sum at which the bucket ends (0 to 1), then the ranks. The key does not depend
    on other sums, so two ranks that share two sums start the buckets of these sums in the same order, even if each rank has
    further sums.
    """
    ranked: list[tuple[tuple[float, tuple[int, ...]], Bucket]] = []
    for buckets in sums:
        total, done = max(1, sum(bucket.numel for bucket in buckets)), 0
        for bucket in buckets:
            done += bucket.numel
            ranked.append(((done / total, bucket.sum.ranks), bucket))
    return [bucket for _, bucket in sorted(ranked, key=lambda entry: entry[0])]


def last_over_ranks(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Return the bucket that starts last for each set of ranks. `buckets` are in starting order.

    These buckets never start during backward.

    An early start of the last bucket would gain nothing. While a bucket is not sent, changes of its gradients by the training loop
    can be detected (`Synchroniser.check_untouched`).
    """
    return list({bucket.sum.ranks: bucket for bucket in buckets}.values())


# --- Parameters of a sharded bucket ---


class BucketValues:
    """The parameters of `bucket` in flat memory, at the same offsets as their gradients.

    `owned` is the slice that the optimizer steps on.

    `owned` is a slice of the parameters themselves, or a master copy of this slice if the gradient shard has another dtype or
    device. Collective over `group`: the memory is shared where possible.
    """

    @torch.no_grad()
    def __init__(self, bucket: Bucket, group: RankGroup) -> None:
        self.bucket, self.group = bucket, group
        shared, layout = bucket.transport.shares_memory, bucket.layout
        self.memory = allocate(group, bucket.numel, layout.dtype, layout.device, shared)
        self._elsewhere: list[tuple[Tensor, Tensor, OwnedSpan | None]] = []
        spans = {span.index: span for span in bucket.spans}
        self._spans = [spans.get(index) for index in range(len(bucket.parameters))]
        views = bucket.layout.views(self.memory.own[: bucket.layout.numel])
        for parameter, view, span in zip(bucket.parameters, views, self._spans, strict=True):
            local = local_part(parameter)
            view.copy_(local)
            if is_dtensor(parameter):
                # FSDP2 manages the memory of its DTensors: the elements stay there, and are copied in and out.
                self._elsewhere.append((local, view, span))
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
        """Copy changes of the parameters since the last step, such as loaded weights, to the flat memory and the master copy.

        A parameter whose memory was replaced is moved back into the bucket, with its values. Elements of the master copy
        keep their full precision wherever the parameter still equals the rounded copy.
        """
        # Only elements that this rank owns: the others come from their owners, whose all-gather may be under way.
        for local, view, span in self._elsewhere:
            if span is not None:
                flattened(view)[span.start : span.stop].copy_(flattened(local)[span.start : span.stop])
        if not self._elsewhere:
            for parameter, view, span in zip(self.bucket.parameters, self._views, self._spans, strict=True):
                if parameter.data_ptr() != view.data_ptr():
                    if span is not None:
                        # Through a tensor with the strides of the view: the new memory may have another memory format.
                        values = torch.empty_like(view).copy_(parameter)
                        flattened(view)[span.start : span.stop].copy_(flattened(values)[span.start : span.stop])
                    parameter.data = view
        if self.has_master and self.bucket.used:
            now = self._own_part.to(self.owned.device)
            self.owned.copy_(torch.where(now == self.owned.to(now.dtype), self.owned, now.to(self.owned.dtype)))

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the owned slice from the master copy to this rank's parameters; nothing is sent."""
        if self.has_master:
            self._own_part.copy_(self.owned)

    @torch.no_grad()
    def copy_out(self) -> None:
        """Copy values from the flat memory to parameters that have other memory (DTensors). Called after the all-gather."""
        for local, view, _ in self._elsewhere:
            local.copy_(view)
