"""The norm of the whole world's gradient: local sums of powers, one collective, one root.

`Meter` reads the gradient blocks of this rank once and leaves a small fp64 vector on the device;
`reduce_norms` sums the vectors of all ranks with one all-reduce, so every rank has the same bits. Nothing
here waits for the device or looks at a value on the host.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.errors import GradientError
from colonnade.gradients.sums import HALVES
from colonnade.parallel.flat import FlatLayout, flattened, padded

# --------------------------------------------------------------------------------------------------
# Gradient blocks: what each rank adds to a norm that covers the whole world.
#
# A block is a local gradient that `count` world ranks hold alike; this rank is number `index` among them. Each
# element must be counted once, so replica i of n reads only the i-th slice of the block; without an index it reads all,
# and counts 1/n of it.
# --------------------------------------------------------------------------------------------------


SLICE = 64
"""Slices of a replicated block start at multiples of this many elements, so that their loads stay aligned."""

CHUNK = 1 << 16
"""Elements that one program of the CUDA norm adds up."""

STEP_CHUNK = 1024
"""Elements that one program of the CUDA optimizer step updates."""

UNIT = 8
"""The CUDA kernels take all starts and lengths to be multiples of this many elements."""


@dataclass(frozen=True, eq=False)
class GradientBlock:
    """A local gradient, the `count` ranks that hold the same elements, this rank's `index`, and its slot.

    A slot is what gets a norm of its own: a clip group, a layer, a parameter.
    """

    tensor: Tensor
    count: int = 1
    index: int | None = 0
    slot: int = 0

    def __post_init__(self) -> None:
        if self.index is not None and not 0 <= self.index < self.count:
            raise GradientError(
                f"the index of a block held by {self.count} ranks is 0 to {self.count - 1}, not {self.index}"
            )
        if self.slot < 0:
            raise GradientError(f"a slot is a number from 0 on, not {self.slot}")

    @property
    def owned(self) -> Tensor:
        """The slice of the block this rank reads; the slices of all holders make up the block once."""
        if self.count == 1 or self.index is None:
            return self.tensor
        flat = flattened(self.tensor)
        units = -(-flat.numel() // SLICE)
        start, stop = (at * units // self.count * SLICE for at in (self.index, self.index + 1))
        return flat[start:stop]

    @property
    def weight(self) -> float:
        """How much of what is read counts."""
        return 1.0 / self.count if self.index is None else 1.0


def bucket_blocks(
    layout: FlatLayout,
    buffer: Tensor,
    holdings: Sequence[tuple[int, int | None]],
    slots: Sequence[int] | None = None,
    *,
    absent: Collection[int] = (),
    alone: Collection[int] = (),
) -> list[GradientBlock]:
    """The blocks of a flat gradient bucket: neighbours with equal (count, index) and slot become one block.

    `absent` are the indices without a gradient this step. `alone` are those that another holder may keep in
    another bucket or at another place (tied parameters): their slices must not depend on their neighbours.
    Padding must be zero, as `FlatLayout.allocate` leaves it.
    """
    keys = [(*holding, slot) for holding, slot in zip(holdings, slots or [0] * len(layout), strict=True)]
    runs: list[tuple[int, int]] = []
    for index in range(len(layout)):
        if index in absent:
            continue
        before = index - 1
        joins = runs and runs[-1][1] == before and keys[before] == keys[index]
        if joins and index not in alone and before not in alone:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return [
        GradientBlock(buffer[layout.spans[first].start : padded(layout.spans[last].stop, layout.dtype)], *keys[first])
        for first, last in runs
    ]


def chunk_table(spans: Sequence[tuple[int, int]], size: int, device: torch.device) -> Tensor:
    """Cut spans [start, stop) into chunks of at most `size` elements: int32 rows (start, stop, span index).

    Starts and stops are in units of `UNIT` elements, so that a kernel knows them to be aligned; a stop is
    rounded up, into the padding.
    """
    step = size // UNIT
    pairs = [(start // UNIT, -(-stop // UNIT)) for start, stop in spans]
    total = sum(-(-(stop - start) // step) for start, stop in pairs)
    # On the host also where another device is the default one.
    starts, stops = torch.tensor(pairs, dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
    counts = (stops - starts + step - 1) // step
    owner = torch.repeat_interleave(torch.arange(len(spans), device="cpu"), counts, output_size=total)
    first = torch.cumsum(counts, 0) - counts
    begin = starts[owner] + (torch.arange(total, device="cpu") - first[owner]) * step
    table = torch.stack([begin, torch.minimum(begin + step, stops[owner]), owner], 1).to(torch.int32)
    return to_device(table, device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor without making the host wait for the device."""
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one, as kernel launches need it; free when it already is."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


def check_order(p: float) -> float:
    """A norm order: a positive number, or inf; sums of powers above the 32nd of small gradients vanish in fp64."""
    try:
        order = float(p)
    except (TypeError, ValueError, OverflowError):
        order = math.nan
    if not 0 < order <= 32 and order != math.inf:
        raise GradientError(f"the order of a gradient norm is a number above 0 and up to 32, or inf, not {p!r}")
    return order


# --------------------------------------------------------------------------------------------------
# The two ways to read gradients once for a norm, both without a copy and without waiting for the device.
#
# Rows too short to lose digits in fp32 are added up in fp64: as fast as one read of the memory, and right
# to about 1e-8. `KernelReader` does it for the 2-norm on CUDA, with one Triton launch per buffer and one to
# finish; `TorchReader` does everything else.
# --------------------------------------------------------------------------------------------------


ROW = 1024
"""Elements added in fp32 before fp64 takes over; longer rows are no faster and less exact."""

SMALL, LARGE = 1 << 14, 1 << 18
"""On a CPU, tensors above SMALL elements are cut, and those from LARGE on read as a table by all threads.

Squares of half-precision values are so short that their sums err to one side: those are cut at a quarter."""

_KEPT = 256
"""How many indices of readers are kept on devices."""

PIECE = 1 << 20
"""Half-precision elements turned into fp32 at a time on a CPU, whose norm cannot do that on the fly."""


def kernels_available() -> bool:
    """Whether Triton kernels can be built here."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def suits_kernel(rows: Sequence[Tensor], p: float) -> bool:
    """Whether `KernelReader` can read these flat tensors of one device."""
    return (
        p == 2.0
        and kernels_available()
        and all(row.is_cuda and row.is_contiguous() and row.dtype in (torch.float32, *HALVES) for row in rows)
        and all(row.numel() % UNIT == 0 and row.data_ptr() % (UNIT * row.element_size()) == 0 for row in rows)
    )


def join(values: Tensor, lengths: Tensor, p: float) -> Tensor:
    """Sums (maxima for p = inf) of consecutive rows of `values`, `lengths` of them each; 0 for none."""
    if len(values) and len(lengths) == 1:
        return values.amax(0, keepdim=True) if math.isinf(p) else values.sum(0, keepdim=True)
    how = "max" if math.isinf(p) else "sum"
    # `unsafe` leaves out checks of the lengths that would wait for the device.
    return torch.segment_reduce(values, how, lengths=lengths, unsafe=True, initial=0.0)


_made: dict[object, Tensor] = {}


def _kept(key: object, make: Callable[[], Tensor]) -> Tensor:
    """What was made once for this key: what measures loose gradients is built anew in every step. Not to be written to."""
    found = _made.get(key)
    if found is None:
        found = make()
        if type(found) is Tensor:  # not a fake one of a plan
            if len(_made) == _KEPT:
                _made.clear()
            _made[key] = found
    return found


def numbers_on(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """These numbers on a device. The host does not wait for it, nor for what another default device would make of them."""
    key = numbers, dtype, device
    return _kept(key, lambda: to_device(torch.tensor(numbers, dtype=dtype, device="cpu"), device))


def _order_on(owners: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Where the values of each owner lie, owner after owner, if `counts` of them come for each of `owners` in turn."""

    def make() -> Tensor:
        starts = [0, *accumulate(counts)]
        ordered = sorted(range(len(owners)), key=owners.__getitem__)
        runs = [torch.arange(starts[at], starts[at + 1], device="cpu") for at in ordered]
        return to_device(torch.cat(runs), device)

    return _kept((owners, counts, device), make)


class TorchReader:
    """Norms of rows of at most 1K elements on a CPU, of whole tensors elsewhere; their powers added per tensor."""

    def __init__(self, rows: Sequence[Tensor], p: float) -> None:
        self._p = p
        self._tables: list[Tensor] = []
        self._small: dict[torch.dtype, list[Tensor]] = {}
        of_tables: list[int] = []
        of_small: dict[torch.dtype, list[int]] = {}
        (device,) = {row.device for row in rows}
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
        owners = [*of_tables, *(owner for dtype in self._small for owner in of_small[dtype])]
        counts = [*map(len, self._tables), *[1] * (len(owners) - len(of_tables))]
        lengths = [0] * len(rows)
        for owner, count in zip(owners, counts, strict=True):
            lengths[owner] += count
        self._lengths = numbers_on(tuple(lengths), torch.int64, device)
        self._order: Tensor | None = None
        if owners != sorted(owners):
            self._order = _order_on(tuple(owners), tuple(counts), device)
        self._shape, self._device = (2, len(rows)), device

    def __call__(self) -> Tensor:
        norms = [norm for table in self._tables for norm in _row_norms(table, self._p)]
        norms += [_small_norms(tensors, self._p) for tensors in self._small.values()]
        if not norms:
            return torch.zeros(self._shape, dtype=torch.float64, device=self._device)
        first, *others = norms
        values = (torch.cat(norms) if others else first).double()
        if self._p == 2.0:
            values.square_()
        elif self._p != 1.0 and not math.isinf(self._p):
            values.pow_(self._p)
        if self._order is not None:
            values = values[self._order]
        return _marked(join(values, self._lengths, self._p), self._p)


def _row_length(numel: int) -> int:
    """At most ROW, and if possible such that nothing is left over: every further operation costs its launch."""
    return next((length for length in range(ROW, ROW // 2, -1) if numel % length == 0), ROW)


def _row_norms(table: Tensor, p: float) -> list[Tensor]:
    if table.dtype not in HALVES:
        return [torch.linalg.vector_norm(table, p, dim=1)]
    _, length = table.shape
    return [torch.linalg.vector_norm(part, p, dim=1, dtype=torch.float32) for part in table.split(PIECE // length)]


def _small_norms(tensors: list[Tensor], p: float) -> Tensor:
    first, *others = tensors
    wide = torch.float32 if first.dtype in HALVES else None
    if not others:
        return torch.linalg.vector_norm(first, p, dtype=wide).view(1)
    return torch.stack(torch._foreach_norm(tensors, p, dtype=wide))


def _marked(values: Tensor, p: float) -> Tensor:
    """(values, marks): 1 for a non-finite value; for p = inf a NaN becomes inf marked 2, to survive a MAX."""
    if not math.isinf(p):
        return torch.stack([values, (values * 0).nan_to_num_(nan=1.0)])  # inf * 0 is NaN as well
    nan = values.isnan()
    values = torch.where(nan, math.inf, values)
    return torch.stack([values, values.isinf().double() + nan.double()])


class KernelReader:
    """2-norms through the Triton kernels: flat, aligned tensors of fp32 or half precision on CUDA."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        from colonnade.optim.kernels import norm_kernels

        self._kernels = norm_kernels
        (self._device,) = {row.device for row in rows}
        self._bases: list[Tensor] = []
        self._launches: list[tuple[Tensor, int]] = []
        chunks_of = [-(-row.numel() // CHUNK) for row in rows]
        ranges = torch.zeros(len(rows), 2, dtype=torch.int32, device="cpu")
        first = 0
        for members in _by_storage(rows):
            own = [rows[index] for index in members]
            origin = min(int(row.storage_offset()) for row in own)
            end = max(int(row.storage_offset()) + row.numel() for row in own)
            self._bases.append(next(iter(own)).as_strided((end - origin,), (1,), origin))
            starts = [int(row.storage_offset()) - origin for row in own]
            spans = [(start, start + row.numel()) for start, row in zip(starts, own, strict=True)]
            table = chunk_table(spans, CHUNK, self._device)
            self._launches.append((table, first))
            for index in members:
                ranges[index, 0], ranges[index, 1] = first, first + chunks_of[index]
                first += chunks_of[index]
        self._ranges = to_device(ranges, self._device)
        self._partial = torch.zeros(max(first, 1), dtype=torch.float64, device=self._device)

    def __call__(self) -> Tensor:
        with on_device(self._device):
            for base, (table, first) in zip(self._bases, self._launches, strict=True):
                self._kernels.square_sums(base, table, self._partial[first:])
            return self._kernels.add_ranges(self._partial, self._ranges)


def _by_storage(rows: Sequence[Tensor]) -> list[list[int]]:
    """Indices of the non-empty rows, together when they lie in one buffer."""
    groups: dict[tuple[int, torch.dtype], list[int]] = {}
    for index, row in enumerate(rows):
        if row.numel():
            groups.setdefault((row.untyped_storage().data_ptr(), row.dtype), []).append(index)
    return list(groups.values())


@dataclass(frozen=True)
class Norms:
    """The reduced sums of powers (for p = inf: maxima) per slot, fp64, the same bits on every rank.

    `nonfinite` is above 0 for a slot with a non-finite block: how many blocks there were in the world, or
    just 1 for p = inf.
    """

    p: float
    sums: Tensor
    nonfinite: Tensor

    def per_slot(self) -> Tensor:
        """The norm of every slot."""
        return self._root(self.sums)

    def total(self, counted: Tensor | None = None) -> Tensor:
        """The norm over the slots of the mask `counted` (all of them without one), as a 0-dim tensor."""
        sums = self.sums if counted is None else torch.where(counted, self.sums, 0.0)
        if sums.numel() == 1:
            return self._root(sums.view(()))
        return self._root(sums.amax(-1) if math.isinf(self.p) else sums.sum(-1))

    def over(self, members: Tensor) -> Tensor:
        """The norms of several sets of slots at once: `members` is a mask of shape (sets, slots)."""
        sums = torch.where(members, self.sums, 0.0)
        return self._root(sums.amax(-1) if math.isinf(self.p) else sums.sum(-1))

    def _root(self, sums: Tensor) -> Tensor:
        if self.p == 1.0 or math.isinf(self.p):
            return sums
        return sums.sqrt() if self.p == 2.0 else sums.pow(1.0 / self.p)


class Meter:
    """Reads a fixed list of blocks and returns this rank's part of the norm, as often as asked.

    The blocks must stay where they are (flat gradient buffers do); only their values may change between
    measurements. With `once` nothing is prepared on the device that only a second measurement would pay back.
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
            raise GradientError(f"a block has slot {slot}, but there are only {slots} slots (0 to {slots - 1})")
        devices = list(dict.fromkeys(block.tensor.device for block in blocks))
        self.device = device or next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        self._parts = [
            _DeviceSums([b for b in blocks if b.tensor.device == d], self.p, slots, once=once) for d in devices
        ]

    @torch.no_grad()
    def measure(self) -> Tensor:
        """The vector for `reduce_norms`: a value per slot, then a count of non-finite blocks per slot."""
        vectors = [part.vector().to(self.device, non_blocking=True) for part in self._parts]
        if not vectors:
            return torch.zeros(2 * self.slots, dtype=torch.float64, device=self.device)
        first, *others = vectors
        if not others:
            return first
        stacked = torch.stack(vectors)
        return stacked.amax(0) if math.isinf(self.p) else stacked.sum(0)


def powsums(
    blocks: Sequence[GradientBlock],
    p: float = 2.0,
    slots: int = 1,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """One measurement of blocks that will not be seen again; see `Meter`."""
    return Meter(blocks, p, slots=slots, device=device, once=True).measure()


def reduce_norms(
    vector: Tensor, p: float = 2.0, group: dist.ProcessGroup | None = None, *, piggybacked: int = 0, whole: bool = False
) -> Norms:
    """Join the vectors of all ranks of `group` (None: the world) with exactly one all-reduce, in place.

    Every rank of the group must call it, with the same number of slots, also a rank without blocks. The last `piggybacked`
    numbers are none of the norm's: they are joined along with it. `whole`: every rank has measured everything, so that
    there is nothing to join.
    """
    order = check_order(p)
    if not whole and dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(vector, dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM, group=group)
    values, nonfinite = vector[: len(vector) - piggybacked].view(2, -1).unbind(0)
    if math.isinf(order):  # a MAX may drop a NaN, so it travelled as inf with the mark 2
        values = torch.where(nonfinite > 1.5, math.nan, values)
        nonfinite = nonfinite.clamp(max=1.0)
    return Norms(order, values, nonfinite)


class _DeviceSums:
    """Sums of powers of the blocks of one device, a value per slot; the plan is made once, `vector` runs it."""

    def __init__(self, blocks: Sequence[GradientBlock], p: float, slots: int, *, once: bool) -> None:
        self._p = p
        self._blocks = sorted(blocks, key=lambda block: block.slot)
        self._read = _reader([block.owned for block in self._blocks], p, once=once)
        (device,) = {block.tensor.device for block in blocks}
        self._weights: Tensor | None = None
        weights = [block.weight for block in self._blocks]
        if not math.isinf(p) and any(weight != 1.0 for weight in weights):
            self._weights = numbers_on(tuple(weights), torch.float64, device)
        self._one_each = [block.slot for block in self._blocks] == list(range(slots))
        counts = Counter(block.slot for block in self._blocks)
        self._lengths = numbers_on(tuple(counts[slot] for slot in range(slots)), torch.int64, device)

    def vector(self) -> Tensor:
        """2 x slots fp64 numbers: a value per slot, then how many of its blocks were not finite."""
        values = self._read()
        if self._weights is not None:
            sums, marks = values
            values = torch.stack([sums * self._weights, marks])
        if self._one_each:
            return values.reshape(-1)
        return join(values.t().contiguous(), self._lengths, self._p).t().reshape(-1)


def _reader(tensors: Sequence[Tensor], p: float, *, once: bool) -> Callable[[], Tensor]:
    """What measures these tensors: returns (2, tensors) in fp64, the values and the non-finite marks."""
    rows = [flattened(tensor) for tensor in tensors]
    if once:
        return TorchReader(rows, p)
    for tensor, row in zip(tensors, rows, strict=True):
        if row.numel() and row.data_ptr() != tensor.data_ptr():
            raise GradientError(
                f"a gradient of shape {tuple(tensor.shape)} and strides {tensor.stride()} has holes or "
                "overlaps, so it cannot be measured in place; make it contiguous or use powsums()"
            )
    return KernelReader(rows) if suits_kernel(rows, p) else TorchReader(rows, p)
