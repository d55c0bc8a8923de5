"""The norm of the global gradient: local sums of powers, one all-reduce, one root.

A rank describes its gradients by `GradientBlock`s: a tensor, the number of ranks that hold the same elements, and a slot. A
slot is the number of a clip group, a layer or a parameter whose norm is measured separately. `Meter` reads this rank's blocks
once and leaves a small fp64 vector on the device: a sum of powers per slot, and a count of non-finite blocks per slot.
`reduce_norms` all-reduces the vectors, so every rank has the same bits, and returns them as `Norms`, which takes roots. The
docstring of `reduce_norms` explains why a single collective suffices.

No function of this file waits for the device or reads a value on the host. Sums over blocks and ranks are in fp64 for gradients of
any dtype, and each element is counted by exactly one rank (or by several ranks with weights that add up to 1). So the norm
depends on the parallel layout only in the last digits of fp64.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.errors import GradientError
from colonnade.gradients.sums import HALVES
from colonnade.parallel.flat import FlatLayout, flattened, padded

# --- Blocks: the contribution of a rank ---
#
# `count` ranks hold the same elements of a block, and this rank is number `index` among these replicas. Each element must be
# counted once: replica i of n reads only the i-th slice, so that replicas also share the work. A sharded optimizer may have
# split the parameter at different places on different ranks, so they could not agree on slices. A rank without an index
# therefore reads all it has, and its sum counts with weight 1/n.


SLICE = 64
"""Slices of a replicated block start at multiples of this many elements, to keep loads aligned."""


class ScatteredGradient:
    """Gradients at arbitrary addresses, in place of a flat buffer.

    For each gradient, the object has the address at which element 0 of a flat buffer would be that contained this gradient. Kernels
    read the addresses from device memory, so what is built for a layout stays valid when autograd allocates gradients elsewhere.
    """

    def __init__(self, layout: FlatLayout) -> None:
        self.dtype, self.device = layout.dtype, layout.device
        self.like = torch.empty((), dtype=layout.dtype, device=layout.device)
        self.addresses = torch.zeros(len(layout), dtype=torch.int64, device=layout.device)
        self.limits = to_device(torch.tensor([span.stop for span in layout.spans], device="cpu"), layout.device)
        self._numel, self._known = layout.numel, list[int]()

    def numel(self) -> int:
        """The number of elements of the flat buffer."""
        return self._numel

    def point_to(self, addresses: list[int]) -> None:
        """Set the addresses of the gradients for the next step."""
        if addresses != self._known:
            self.addresses.copy_(pinned(torch.tensor(addresses, device="cpu")), non_blocking=True)
            self._known = addresses


@dataclass(frozen=True, eq=False)
class ScatteredRange:
    """The elements [start, stop) of a flat buffer that a `ScatteredGradient` replaces. All are elements of gradient `owner`."""

    gradient: ScatteredGradient
    owner: int
    start: int
    stop: int

    @property
    def device(self) -> torch.device:
        return self.gradient.device

    def numel(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> ScatteredRange:
        start, stop, _ = part.indices(self.numel())
        return replace(self, start=self.start + start, stop=self.start + max(start, stop))


@dataclass(frozen=True, eq=False)
class GradientBlock:
    """A local gradient, the number of its replicas (`count`), the index of this rank among the replicas, and its slot."""

    tensor: Tensor | ScatteredRange
    count: int = 1
    index: int | None = 0
    slot: int = 0

    def __post_init__(self) -> None:
        if self.index is not None and not 0 <= self.index < self.count:
            raise GradientError(
                f"a block has {self.count} replicas and index {self.index}; the index must be from 0 to "
                f"{self.count - 1}"
            )
        if self.slot < 0:
            raise GradientError(f"a slot must be 0 or larger, not {self.slot}")

    @property
    def owned(self) -> Tensor | ScatteredRange:
        """The slice of the block that this rank reads. The slices of all replicas together cover the block exactly once."""
        if self.count == 1 or self.index is None:
            return self.tensor
        flat = _flat(self.tensor)
        units = -(-flat.numel() // SLICE)
        start, stop = (at * units // self.count * SLICE for at in (self.index, self.index + 1))
        return flat[start:stop]

    @property
    def weight(self) -> float:
        """The factor by which the sum of powers of `owned` is multiplied."""
        return 1.0 / self.count if self.index is None else 1.0


def _flat(tensor: Tensor | ScatteredRange) -> Tensor | ScatteredRange:
    return tensor if isinstance(tensor, ScatteredRange) else flattened(tensor)


def bucket_blocks(
    layout: FlatLayout,
    buffer: Tensor,
    holdings: Sequence[tuple[int, int | None]],
    slots: Sequence[int] | None = None,
    *,
    absent: Collection[int] = (),
    separate: Collection[int] = (),
) -> list[GradientBlock]:
    """The blocks of a flat gradient bucket.

    Args:
        layout: Places of the parameters in the buffer. Padding must be zero, as `FlatLayout.allocate` leaves it.
        buffer: The flat gradients.
        holdings: (count, index) of every parameter, as in `GradientBlock`.
        slots: The slot of every parameter; 0 for all if omitted.
        absent: Indices of parameters without a gradient in this step.
        separate: Parameters that a replica may keep in another bucket or at another offset (tied parameters). Each becomes a
            separate block, because its slice must not depend on its neighbours in the buffer.
    """
    # Each block costs a tensor, a chunk and a row of the reader, so neighbours in the buffer with equal (count, index) and slot
    # become one block, including the padding between them.
    keys = [(*holding, slot) for holding, slot in zip(holdings, slots or [0] * len(layout), strict=True)]
    runs: list[tuple[int, int]] = []
    for index in range(len(layout)):
        if index in absent:
            continue
        before = index - 1
        joins = runs and runs[-1][1] == before and keys[before] == keys[index]
        if joins and index not in separate and before not in separate:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return [
        GradientBlock(buffer[layout.spans[first].start : padded(layout.spans[last].stop, layout.dtype)], *keys[first])
        for first, last in runs
    ]


# --- The norm: measure, one collective, root ---


def check_order(p: float) -> float:
    """Validate the order p of a norm.

    Raises GradientError for orders above 32 (except inf), because powers of small gradients would underflow.
    """
    try:
        order = float(p)
    except (TypeError, ValueError, OverflowError):
        order = math.nan
    if not 0 < order <= 32 and order != math.inf:
        raise GradientError(f"the order of the gradient norm is {p!r}; it must be above 0 and at most 32, or inf")
    return order


class Meter:
    """Computes the sums of powers of a fixed list of blocks, any number of times.

    The memory of the blocks must stay the same between measurements (as the memory of flat gradient buffers does); only values may
    change.

    Args:
        blocks: The blocks of this rank, on any devices.
        p: The order of the norm.
        slots: The number of slots, the same on every rank.
        device: The device of the result; by default the first device of a block that is not the CPU.
        once: Skip preparations on the device that pay off only from the second measurement on.
    """

    @torch.no_grad()
    def __init__(
        self,
        blocks: Sequence[GradientBlock],
        p: float = 2.0,
        *,
        slots: int = 1,
        device: torch.device | None = None,
        once: bool = False,
    ) -> None:
        self.p = check_order(p)
        self.slots = slots
        for slot in (block.slot for block in blocks if block.slot >= slots):
            raise GradientError(f"a block has slot {slot}, but slots are 0 to {slots - 1}")
        devices = list(dict.fromkeys(block.tensor.device for block in blocks))
        self.device = device or next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        self._sums = [
            _DeviceSums([b for b in blocks if b.tensor.device == d], self.p, slots, once=once) for d in devices
        ]

    @torch.no_grad()
    def measure(self) -> Tensor:
        """Return the vector for `reduce_norms`: the sums of powers of all slots, then the numbers of non-finite blocks of all
        slots.
        """
        vectors = [sums.vector().to(self.device, non_blocking=True) for sums in self._sums]
        if not vectors:
            return torch.zeros(2 * self.slots, dtype=torch.float64, device=self.device)
        first, *others = vectors
        if not others:
            return first
        stacked = torch.stack(vectors)
        return stacked.amax(0) if math.isinf(self.p) else stacked.sum(0)


class _DeviceSums:
    """Sums of powers per slot, of the blocks on one device; planned once, then run by `vector`."""

    def __init__(self, blocks: Sequence[GradientBlock], p: float, slots: int, *, once: bool) -> None:
        self._p = p
        self._blocks = sorted(blocks, key=lambda block: block.slot)
        owned = [block.owned for block in self._blocks]
        rows = [_flat(tensor) for tensor in owned]
        tensors = [row for row in rows if isinstance(row, Tensor)]
        if once:
            self._read: Callable[[], Tensor] = TorchReader(tensors, p)
        else:
            # A reader that is kept reads the same memory again, but a copy made by `flattened` would be out of date by then.
            for tensor, row in zip(owned, rows, strict=True):
                if not isinstance(tensor, Tensor) or not isinstance(row, Tensor) or not row.numel():
                    continue
                if row.data_ptr() != tensor.data_ptr():
                    raise GradientError(
                        f"a gradient of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps or "
                        "overlaps in memory, so it cannot be measured in place. Make it contiguous, or use powsums()."
                    )
            self._read = KernelReader(rows) if suits_kernel(rows, p) else TorchReader(tensors, p)

        # Blocks that replicas read in full have a weight below 1. A maximum needs none.
        (device,) = {block.tensor.device for block in blocks}
        self._weights: Tensor | None = None
        weights = [block.weight for block in self._blocks]
        if not math.isinf(p) and any(weight != 1.0 for weight in weights):
            self._weights = numbers_on(tuple(weights), torch.float64, device)
        # With one block per slot, in order, there is no sum over blocks, which saves launches. The kernels can also sum the blocks of
        # each slot, where these have the same weight.
        counts = Counter(block.slot for block in self._blocks)
        per_slot = [counts[slot] for slot in range(slots)]
        self._one_value_per_slot = per_slot == [1] * slots
        if self._weights is None and isinstance(self._read, KernelReader) and self._read.join(per_slot):
            self._one_value_per_slot = True
        self._lengths = numbers_on(tuple(per_slot), torch.int64, device)

    def vector(self) -> Tensor:
        """Return a vector of 2 x slots fp64 numbers: first the sum of powers of each slot, then the number of non-finite blocks
        of each slot.
        """
        values = self._read()
        if self._weights is not None:
            sums, nonfinite = values
            values = torch.stack([sums * self._weights, nonfinite])
        if self._one_value_per_slot:
            return values.reshape(-1)
        return segment_sums(values.t().contiguous(), self._lengths, self._p).t().reshape(-1)


def powsums(
    blocks: Sequence[GradientBlock],
    p: float = 2.0,
    slots: int = 1,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Measure blocks once; arguments as for `Meter`."""
    return Meter(blocks, p, slots=slots, device=device, once=True).measure()


def reduce_norms(
    vector: Tensor,
    p: float = 2.0,
    group: dist.ProcessGroup | None = None,
    *,
    piggybacked: int = 0,
    measures_full_gradient: bool = False,
) -> Norms:
    """Reduce the vectors of all ranks to norms, with exactly one all-reduce, in place.

    Why one all-reduce suffices: shards and replicas of different parameters are on different sets of ranks, which seems to need one
    collective per set. But the vectors are weighted so that every element of the global gradient counts once in their sum over all
    ranks (a replica reads only its slice, or has the weight 1 / number of replicas). So a single sum over the world adds all
    parameters at once. The vector has the sums of all slots and the counts of non-finite blocks, so that clipping by group, layer
    or parameter and the decision to skip a step need no further collective. All ranks get the same bits, and decide alike.

    `Stepper.step` makes one other all-reduce, for the flags of a step (`PiggybackedFlags`, NCCL only). Usually these flags are sent
    with a gradient bucket, or as `piggybacked` entries of this vector. If neither is possible, because clipping is off or every
    rank measures the full gradient, the flags get an all-reduce of their own.

    Collective over `group`, including ranks without blocks.

    Args:
        vector: The result of `Meter.measure`, with the same number of slots on every rank.
        p: The order of the norm.
        group: The ranks that hold the gradient; None for the world.
        piggybacked: The number of trailing entries that are not part of the norm and only share its collective.
        measures_full_gradient: Every rank has measured the full gradient (on GPUs, if all parameters are replicated on all
            ranks; and without other ranks), so nothing is communicated.
    """
    order = check_order(p)
    if not measures_full_gradient and dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(vector, dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM, group=group)
    values, nonfinite = (vector[:-piggybacked] if piggybacked else vector).view(2, -1).unbind(0)
    if math.isinf(order):  # MAX may ignore a NaN, so the readers send it as inf with the number 2
        values = torch.where(nonfinite > 1.5, math.nan, values)
        nonfinite = nonfinite.clamp(max=1.0)
    return Norms(order, values, nonfinite)


@dataclass(frozen=True)
class Norms:
    """The reduced sums of powers per slot (maxima for p = inf), in fp64, with the same bits on every rank.

    `nonfinite` has, for every slot, the number of non-finite blocks in the world; for p = inf, 1 if there are any.
    """

    p: float
    sums: Tensor
    nonfinite: Tensor

    def per_slot(self) -> Tensor:
        """The norm of every slot."""
        return self._root(self.sums)

    def total(self, counted: Tensor | None = None) -> Tensor:
        """The norm over all slots, or over those in the mask `counted`, as a 0-dim tensor."""
        sums = self.sums if counted is None else torch.where(counted, self.sums, 0.0)
        if sums.numel() == 1:
            return self._root(sums.view(()))
        return self._root(sums.amax(-1) if math.isinf(self.p) else sums.sum(-1))

    def over(self, members: Tensor) -> Tensor:
        """The norm of each of several sets of slots. `members` is a mask of shape (sets, slots)."""
        sums = torch.where(members, self.sums, 0.0)
        return self._root(sums.amax(-1) if math.isinf(self.p) else sums.sum(-1))

    def _root(self, sums: Tensor) -> Tensor:
        if self.p == 1.0 or math.isinf(self.p):
            return sums
        return sums.sqrt() if self.p == 2.0 else sums.pow(1.0 / self.p)


# --- Readers: sums of powers of many tensors, without a copy and without waiting for the device ---
#
# A reader is made of flat tensors and called without arguments. It returns (2, tensors) in fp64: per tensor a sum of powers (for
# p = inf a maximum), and a number above 0 if a value is not finite.
#
# Rows too short to lose digits in fp32 are summed in fp32, and the rows' sums in fp64: as fast as one read of the memory, and
# accurate to about 1e-8. `KernelReader` does so for the 2-norm on CUDA, with one Triton launch per buffer and one to finish;
# `TorchReader` handles everything else.


ROW = 1024
"""Elements summed in fp32 before fp64 takes over; longer rows are no faster and less accurate."""

SMALL, LARGE = 1 << 14, 1 << 18
"""On a CPU, tensors above SMALL elements are split, and tensors from LARGE elements on are read as a table by all threads.

Half-precision tensors are split at a quarter of SMALL: their squares have so few digits that errors of long sums are biased."""

PIECE = 1 << 20
"""Half-precision elements converted to fp32 at a time on a CPU, whose norm kernel cannot convert while it reads."""


class TorchReader:
    """Reads tensors with torch's norm functions: norms of short rows on a CPU, of full tensors elsewhere.

    Sums their powers per tensor.
    """

    def __init__(self, rows: Sequence[Tensor], p: float) -> None:
        self._p = p
        self._tables: list[Tensor] = []
        self._small: dict[torch.dtype, list[Tensor]] = {}
        of_tables: list[int] = []
        of_small: dict[torch.dtype, list[int]] = {}
        (device,) = {row.device for row in rows}
        # On a CPU a large tensor becomes a table of rows, and the remainder at its end is split into pieces, as small tensors are.
        # On other devices torch's norm of a full tensor is accurate and fast: it already sums in many short runs.
        cpu = device.type == "cpu"
        for owner, row in enumerate(rows):
            if p == 2.0 and row.is_complex():
                row = torch.view_as_real(row).view(-1)
            numel, full = row.numel(), 0
            if cpu and numel >= LARGE:
                length = _row_length(numel)
                full = numel // length * length
                self._tables.append(row[:full].view(-1, length))
                of_tables.append(owner)
            if full < numel:
                size = SMALL // 4 if row.dtype in HALVES else SMALL
                pieces = row[full:].split(size if cpu else numel)
                self._small.setdefault(row.dtype, []).extend(pieces)
                of_small.setdefault(row.dtype, []).extend([owner] * len(pieces))

        # The norms of all rows and pieces make one vector. `lengths` has the number of its entries per tensor, and `order` puts
        # the entries of each tensor next to each other where tables and pieces have separated them.
        owners = [*of_tables, *(owner for dtype in self._small for owner in of_small[dtype])]
        counts = [*map(len, self._tables), *[1] * (len(owners) - len(of_tables))]
        lengths = [0] * len(rows)
        for owner, count in zip(owners, counts, strict=True):
            lengths[owner] += count
        self._lengths = numbers_on(tuple(lengths), torch.int64, device)
        self._order: Tensor | None = None
        if owners != sorted(owners):

            def order() -> Tensor:
                starts = [0, *accumulate(counts)]
                by_owner = sorted(range(len(owners)), key=owners.__getitem__)
                runs = [torch.arange(starts[at], starts[at + 1], device="cpu") for at in by_owner]
                return to_device(torch.cat(runs), device)

            self._order = _cached((tuple(owners), tuple(counts), device), order)
        self._shape, self._device = (2, len(rows)), device

    def __call__(self) -> Tensor:
        p = self._p
        norms: list[Tensor] = []
        for table in self._tables:
            if table.dtype not in HALVES:
                norms.append(torch.linalg.vector_norm(table, p, dim=1))
                continue
            _, length = table.shape
            parts = table.split(PIECE // length)
            norms += [torch.linalg.vector_norm(part, p, dim=1, dtype=torch.float32) for part in parts]
        for dtype, tensors in self._small.items():
            wide = torch.float32 if dtype in HALVES else None
            first, *others = tensors
            if others:
                norms.append(torch.stack(torch._foreach_norm(tensors, p, dtype=wide)))
            else:
                norms.append(torch.linalg.vector_norm(first, p, dtype=wide).view(1))
        if not norms:
            return torch.zeros(self._shape, dtype=torch.float64, device=self._device)

        # Norms become sums of powers again, in fp64, in the order of the tensors, and are summed per tensor.
        first, *others = norms
        values = (torch.cat(norms) if others else first).double()
        if p == 2.0:
            values.square_()
        elif p != 1.0 and not math.isinf(p):
            values.pow_(p)
        if self._order is not None:
            values = values[self._order]
        values = segment_sums(values, self._lengths, p)

        # A sum over ranks keeps any inf or NaN, so the second number only counts blocks. MAX over ranks may ignore a NaN, so for
        # p = inf a NaN is sent as inf with the number 2.
        if not math.isinf(p):
            return torch.stack([values, (values * 0).nan_to_num_(nan=1.0)])  # inf * 0 is NaN as well
        nan = values.isnan()
        values = torch.where(nan, math.inf, values)
        return torch.stack([values, values.isinf().double() + nan.double()])


def _row_length(numel: int) -> int:
    """The length of a row: at most ROW and, if possible, a divisor of `numel`, because a remainder would cost another launch."""
    return next((length for length in range(ROW, ROW // 2, -1) if numel % length == 0), ROW)


class KernelReader:
    """Reads flat, aligned gradients of fp32 or half precision on CUDA with Triton kernels, for the 2-norm."""

    def __init__(self, rows: Sequence[Tensor | ScatteredRange]) -> None:
        from colonnade.optim import optim_kernels

        self._kernels = optim_kernels
        (self._device,) = {row.device for row in rows}
        # One launch per buffer: tensors of one storage are read by offsets from the first of them, scattered gradients by address.
        members_of: dict[object, list[int]] = {}
        for index, row in enumerate(rows):
            if row.numel():
                storage = (
                    id(row.gradient)
                    if isinstance(row, ScatteredRange)
                    else (row.untyped_storage().data_ptr(), row.dtype)
                )
                members_of.setdefault(storage, []).append(index)

        # Each launch leaves a partial sum per chunk; `ranges` has the range of partial sums of each gradient.
        launches: list[tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor, int]] = []
        chunks_of = [-(-row.numel() // CHUNK) for row in rows]
        ranges = torch.zeros(len(rows), 2, dtype=torch.int32, device="cpu")
        first = 0
        for members in members_of.values():
            scattered = [row for row in (rows[index] for index in members) if isinstance(row, ScatteredRange)]
            own = [row for row in (rows[index] for index in members) if isinstance(row, Tensor)]
            if scattered:
                gradient = scattered[0].gradient
                table = chunk_table([(row.start, row.stop) for row in scattered], CHUNK, torch.device("cpu"))
                table[:, 2] = torch.tensor([row.owner for row in scattered], device="cpu")[table[:, 2].long()]
                base, places = gradient.like, (gradient.addresses, gradient.limits)
                table = to_device(table, self._device)
            else:
                origin = min(int(row.storage_offset()) for row in own)
                end = max(int(row.storage_offset()) + row.numel() for row in own)
                base, places = next(iter(own)).as_strided((end - origin,), (1,), origin), None
                starts = [int(row.storage_offset()) - origin for row in own]
                spans = [(start, start + row.numel()) for start, row in zip(starts, own, strict=True)]
                table = chunk_table(spans, CHUNK, self._device)
            launches.append((base, places, table, first))
            for index in members:
                ranges[index, 0], ranges[index, 1] = first, first + chunks_of[index]
                first += chunks_of[index]
        self._host_ranges, self._ranges = ranges, to_device(ranges, self._device)
        self._partial = torch.zeros(max(first, 1), dtype=torch.float64, device=self._device)
        self._launches = [(base, places, table, self._partial[first:]) for base, places, table, first in launches]

    def join(self, lengths: Sequence[int]) -> bool:
        """From now on, return one sum for each run of so many rows.

        If the chunks of a run are not adjacent, change nothing and return False.
        """
        stops = list(accumulate(lengths))
        joined = torch.zeros(len(lengths), 2, dtype=torch.int32, device="cpu")
        for at, (stop, length) in enumerate(zip(stops, lengths, strict=True)):
            chunks = self._host_ranges[stop - length : stop]
            if length:
                joined[at, 0], joined[at, 1] = chunks[:, 0].min(), chunks[:, 1].max()
            if (chunks[:, 1] - chunks[:, 0]).sum() != joined[at, 1] - joined[at, 0]:
                return False
        self._ranges = to_device(joined, self._device)
        return True

    def __call__(self) -> Tensor:
        with on_device(self._device):
            for base, places, table, sums in self._launches:
                self._kernels.square_sums(base, places, table, sums)
            return self._kernels.add_ranges(self._partial, self._ranges)


def suits_kernel(rows: Sequence[Tensor | ScatteredRange], p: float) -> bool:
    """Whether `KernelReader` can read these flat gradients, all on one device."""
    tensors = [row for row in rows if not isinstance(row, ScatteredRange)]
    return (
        p == 2.0
        and kernels_available()
        and all(row.is_cuda and row.is_contiguous() and row.dtype in (torch.float32, *HALVES) for row in tensors)
        and all(row.numel() % UNIT == 0 and row.data_ptr() % (UNIT * row.element_size()) == 0 for row in tensors)
    )


def segment_sums(values: Tensor, lengths: Tensor, p: float) -> Tensor:
    """Sums (maxima for p = inf) of consecutive segments of rows of `values`; 0 for an empty segment."""
    if len(values) and len(lengths) == 1:
        return values.amax(0, keepdim=True) if math.isinf(p) else values.sum(0, keepdim=True)
    how = "max" if math.isinf(p) else "sum"
    # `unsafe` skips checks of the lengths, which would wait for the device.
    return torch.segment_reduce(values, how, lengths=lengths, unsafe=True, initial=0.0)


_CACHE_SIZE = 256

_cache: dict[object, Tensor] = {}


def _cached(key: object, make: Callable[[], Tensor]) -> Tensor:
    """A small constant tensor on a device, from the cache if it has one for `key`. Must not be written to.

    A meter of gradients outside of buckets is made in every step, and needs the same constants each time.
    """
    found = _cache.get(key)
    if found is None:
        found = make()
        if type(found) is Tensor:  # a fake tensor of a simulated run must not stay
            if len(_cache) == _CACHE_SIZE:
                _cache.clear()
            _cache[key] = found
    return found


def numbers_on(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A cached tensor of these numbers on a device. Does not wait for the device."""
    # Built on the host explicitly, as the default device may be another.
    key = numbers, dtype, device
    return _cached(key, lambda: to_device(torch.tensor(numbers, dtype=dtype, device="cpu"), device))


# --- Shared by the kernels of norm and step ---


CHUNK = 1 << 16
"""Elements that one program of the CUDA norm kernel sums."""

STEP_CHUNK = 1024
"""Elements that one program of the CUDA step kernel updates."""

UNIT = 8
"""All starts and lengths that the CUDA kernels see are multiples of this many elements."""


def kernels_available() -> bool:
    """Whether Triton kernels can be compiled here."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def chunk_table(spans: Sequence[tuple[int, int]], size: int, device: torch.device) -> Tensor:
    """Split spans [start, stop) into chunks of at most `size` elements: int32 rows (start, stop, span index).

    Starts and stops are in units of `UNIT` elements, so that the compiler knows their alignment. Stops are rounded up, into
    the padding.
    """
    step = size // UNIT
    pairs = [(start // UNIT, -(-stop // UNIT)) for start, stop in spans]
    total = sum(-(-(stop - start) // step) for start, stop in pairs)
    # Built on the host explicitly, as the default device may be another.
    starts, stops = torch.tensor(pairs, dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
    counts = (stops - starts + step - 1) // step
    owner = torch.repeat_interleave(torch.arange(len(spans), device="cpu"), counts, output_size=total)
    first = torch.cumsum(counts, 0) - counts
    begin = starts[owner] + (torch.arange(total, device="cpu") - first[owner]) * step
    table = torch.stack([begin, torch.minimum(begin + step, stops[owner]), owner], 1).to(torch.int32)
    return to_device(table, device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device without waiting for it."""
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def pinned(numbers: Tensor) -> Tensor:
    """Copy a CPU tensor to pinned memory, from which the device can copy asynchronously."""
    return numbers.pin_memory()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one, as kernel launches require; costs nothing if it is."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)
