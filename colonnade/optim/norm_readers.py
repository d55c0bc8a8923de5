"""The two ways to read gradients once for a norm, both without a copy and without waiting for the device.

Rows too short to lose digits in fp32 are added up in fp64: as fast as one read of the memory, and right
to about 1e-8. `KernelReader` does it for the 2-norm on CUDA, with one Triton launch per buffer and one to
finish; `TorchReader` does everything else.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from colonnade.optim.blocks import CHUNK, UNIT, chunk_table, on_device, to_device
from colonnade.reduce.options import HALVES

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
