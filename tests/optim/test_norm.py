"""The norm of many blocks equals the norm of the gathered gradient in fp64, on one process and on several."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import GradientError
from colonnade.optim import norm
from colonnade.optim.norm import GradientBlock, Meter, Norms, powsums, reduce_norms
from colonnade.parallel.flat import FlatLayout, padded
from colonnade.testing import run_world
from tests.optim import python_kernels
from tests.optim.watch import Operations, collectives


def reference(tensors: list[Tensor], p: float) -> Tensor:
    """In fp64, on everything at once."""
    wide = [t.reshape(-1).to(torch.complex128 if t.is_complex() else torch.float64).abs() for t in tensors]
    return torch.linalg.vector_norm(torch.cat(wide), p)


def measured(blocks: list[GradientBlock], p: float = 2.0, slots: int = 1) -> Norms:
    return reduce_norms(powsums(blocks, p, slots), p)


def test_slots_have_their_own_norms_whatever_the_order_of_blocks() -> None:
    tensors = [torch.randn(n) for n in (10, 2000, 7, 3000, 5)]
    slots = [3, 0, 1, 0, 3]
    norms = measured([GradientBlock(t, slot=s) for t, s in zip(tensors, slots, strict=True)], slots=5)
    wanted = [
        reference([t for t, s in zip(tensors, slots, strict=True) if s == slot] or [torch.zeros(1)], 2.0)
        for slot in range(5)
    ]
    torch.testing.assert_close(norms.per_slot(), torch.stack(wanted), rtol=1e-6, atol=0)
    torch.testing.assert_close(norms.total(), reference(tensors, 2.0), rtol=1e-6, atol=0)
    counted = torch.tensor([True, False, False, True, False])
    torch.testing.assert_close(norms.total(counted), torch.stack(wanted)[[0, 3]].norm(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_large_and_small_blocks_side_by_side(dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(4)
    tensors = [torch.randn(n, generator=source).to(dtype) for n in (10, 400_007, 16_384, 300_000, 100_000, 3)]
    norms = measured([GradientBlock(t, slot=i) for i, t in enumerate(tensors)], slots=6)
    wanted = torch.stack([reference([t], 2.0) for t in tensors])
    torch.testing.assert_close(norms.per_slot(), wanted, rtol=1e-6, atol=0)


def test_mixed_dtypes_and_holes() -> None:
    tensors = [
        torch.randn(3000).bfloat16(),
        torch.randn(5, 7),
        torch.randn(40, 60)[:, ::2],
        torch.randn(40, 60)[:, :30],
        torch.randn(4, 1).expand(4, 9),
    ]
    torch.testing.assert_close(
        measured([GradientBlock(t) for t in tensors]).total(), reference(tensors, 2.0), rtol=1e-6, atol=0
    )


def test_a_meter_sees_new_values_and_refuses_what_it_cannot_see_again() -> None:
    tensor = torch.randn(5000)
    meter = Meter([GradientBlock(tensor)])
    first = reduce_norms(meter.measure()).total()
    tensor.mul_(3)
    torch.testing.assert_close(reduce_norms(meter.measure()).total(), 3 * first, rtol=1e-6, atol=0)
    with pytest.raises(GradientError, match="gaps or overlaps"):
        Meter([GradientBlock(torch.randn(40, 60)[:, :30])])


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_the_parts_of_several_devices_are_joined(p: float) -> None:
    tensors = [torch.randn(5), torch.randn(7) * 3, torch.randn(4)]
    together = Meter(
        [GradientBlock(tensors[0]), GradientBlock(tensors[1], slot=1), GradientBlock(tensors[2])], p, slots=2
    )
    apart = Meter([GradientBlock(tensors[0]), GradientBlock(tensors[1], slot=1)], p, slots=2)
    apart._sums += Meter([GradientBlock(tensors[2])], p, slots=2)._sums  # as if on another device
    torch.testing.assert_close(apart.measure(), together.measure())


def test_a_slot_that_does_not_exist() -> None:
    with pytest.raises(GradientError, match="slot 2, but slots are 0 to 1"):
        Meter([GradientBlock(torch.zeros(1)), GradientBlock(torch.zeros(1), slot=2)], slots=2)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_is_never_a_plausible_number(p: float, bad: float) -> None:
    tensors = [torch.randn(2000), torch.randn(9), torch.randn(2000)]
    tensors[1][4] = bad
    blocks = [GradientBlock(t, slot=i) for i, t in enumerate(tensors)]
    meter = Meter(blocks, p, slots=3)
    norms = reduce_norms(meter.measure(), p)
    assert norms.nonfinite.tolist() == [0, 1, 0]
    assert norms.per_slot().isfinite().tolist() == [True, False, True]
    assert math.isnan(norms.total().item()) == math.isnan(bad)


def test_whole_blocks_weighted_by_their_replicas() -> None:
    tensor = torch.randn(5000)
    beside = measured([GradientBlock(torch.ones(4)), GradientBlock(torch.ones(9), 3, None)]).total()
    assert beside.item() == pytest.approx(math.sqrt(4 + 9 / 3))
    assert measured([GradientBlock(torch.full((9,), 2.0), 3, None)], math.inf).total().item() == 2.0
    bad = measured([GradientBlock(torch.full((9,), math.inf), 3, None)])
    assert (bad.sums.item(), bad.nonfinite.item()) == (math.inf, 1.0)
    sums = [powsums([GradientBlock(tensor, 3, None)])[0] for _ in range(3)]
    assert sums[0] == sums[1] == sums[2]
    torch.testing.assert_close(sum(sums).sqrt(), tensor.double().norm(), rtol=1e-6, atol=0)


@pytest.mark.slow
def test_fifty_million_elements() -> None:
    source = torch.Generator().manual_seed(3)
    value = torch.randn(50_000_000, generator=source)
    error = measured([GradientBlock(value)]).total() / value.double().norm() - 1
    assert abs(error.item()) < 4e-8
    value.fill_(0.01)
    wanted = math.sqrt(50_000_000) * float(value[0].double())
    assert abs(measured([GradientBlock(value)]).total().item() / wanted - 1) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_host_read_and_no_copy_of_the_gradient(dtype: torch.dtype) -> None:
    blocks = [GradientBlock(torch.randn(6_000_000).to(dtype)), GradientBlock(torch.randn(50).to(dtype))]
    meter = Meter(blocks)
    with Operations() as seen:
        reduce_norms(meter.measure()).total()
    assert seen.host_reads == 0
    assert seen.largest <= 6_000_000 / 512 * 8 + 1024


def world_norm(seed: int, p: float, whole: bool) -> tuple[Tensor, list[str]]:
    """Every rank holds some tensors alone, shares others with random sets of ranks, and some hold nothing."""
    draw = random.Random(seed)
    source = torch.Generator().manual_seed(seed)
    rank, world = dist.get_rank(), dist.get_world_size()
    blocks, everything = [], []
    for _ in range(12):
        numel = draw.choice([0, 1, 63, 65, 1000, 5000])
        tensor = torch.randn(numel, generator=source, dtype=torch.float32)
        holders = sorted(draw.sample(range(world - 1), draw.randint(1, world - 1)))  # the last rank has none
        everything.append(tensor)
        if rank in holders:
            blocks.append(GradientBlock(tensor, len(holders), None if whole else holders.index(rank)))
    with collectives() as called:
        norm = measured(blocks, p).total()
    torch.testing.assert_close(norm, reference(everything, p), rtol=1e-6, atol=0)
    return norm, called


def world_norms(seed: int) -> list[tuple[Tensor, list[str]]]:
    return [world_norm(seed, p, whole) for p in (1.0, 2.0, 3.0, math.inf) for whole in (False, True)]


def test_any_holding_on_four_ranks() -> None:
    for same in zip(*run_world(4, world_norms, 17).values, strict=True):
        assert [called for _, called in same] == [["all_reduce"]] * 4
        assert len({norm.item() for norm, _ in same}) == 1


@pytest.mark.parametrize("numel", [(1 << 17) - 1, 1 << 17, (1 << 17) + 5])
def test_a_complex_gradient_counts_two_numbers_for_each_element(numel: int) -> None:
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(0), dtype=torch.complex64)
    found = Meter([GradientBlock(grad)], 2.0).measure()
    assert reduce_norms(found, 2.0).total().item() == pytest.approx(grad.to(torch.complex128).norm().item(), rel=1e-7)


def test_a_meter_joins_on_the_device_that_is_asked_for_or_has_a_gradient() -> None:
    host, device = GradientBlock(torch.zeros(8)), GradientBlock(torch.zeros(8, device="meta"))
    assert Meter([host]).device == Meter([]).device == torch.device("cpu")
    assert Meter([host, device]).device == Meter([device, host]).device == torch.device("meta")
    assert Meter([host], device=torch.device("meta")).device == torch.device("meta")


def test_piggybacked_numbers_are_not_part_of_the_norm() -> None:
    norms = reduce_norms(torch.tensor([4.0, 9.0, 0.0, 1.0, 7.0], dtype=torch.float64), piggybacked=1)
    assert norms.per_slot().tolist() == [2.0, 3.0]
    assert norms.nonfinite.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1 << 14), (torch.bfloat16, 1 << 12)])
def test_what_is_short_is_read_at_once_and_what_is_large_as_a_table(dtype: torch.dtype, size: int) -> None:
    for numel, pieces, tables in (
        (size, 1, 0),
        (size + 1, 2, 0),
        ((1 << 18) - 1, (1 << 18) // size, 0),
        (1 << 18, 0, 1),
    ):
        reader = norm.TorchReader([torch.zeros(numel, dtype=dtype)], 2.0)
        assert len(reader._small.get(dtype, [])) == pieces
        assert len(reader._tables) == tables


def test_rows_are_as_long_as_divides_them_or_else_a_thousand() -> None:
    lengths = {1024 * 7: 1024, 1000 * 1031: 1000, 513 * 1031: 513, 512 * 1031: 1024, 1_000_003: 1024}
    assert {numel: norm._row_length(numel) for numel in lengths} == lengths


def test_the_launches_of_a_gpu_read_every_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two buffers in turn, one of several chunks, an empty one; the kernels are written in Python."""
    python_kernels.install(monkeypatch)
    one, other = torch.randn(200_000), torch.randn(4000).bfloat16()
    rows = [one[64:160], other[80:160], one[1600:181_600], one[:0], other[800:1600], one[199_968:]]
    reader = norm.KernelReader(rows)
    for factor in (1.0, 2.0):
        one *= factor
        other *= factor
        values, marks = reader()
        torch.testing.assert_close(values, torch.stack([row.double().square().sum() for row in rows]))
        assert marks.tolist() == [0.0] * 6
    assert [len(table) for _, _, table, _ in reader._launches] == [5, 2]  # a launch for each buffer
    other[90] = math.inf
    assert reader()[1].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert norm.KernelReader([one[:0]])().tolist() == [[0.0], [0.0]]


def test_scattered_gradients_are_read_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of three slots at any address, which change between steps; a replica reads its slice of the largest."""
    python_kernels.install(monkeypatch)
    layout = FlatLayout([torch.zeros(200_005), torch.zeros(70), torch.zeros(3)])
    gradient = norm.ScatteredGradient(layout)
    ranges = [
        norm.ScatteredRange(gradient, at, span.start, padded(span.stop, torch.float32))
        for at, span in enumerate(layout.spans)
    ]
    replicas = [
        norm.Meter(
            [
                GradientBlock(ranges[0], 2, replica, slot=1),
                GradientBlock(ranges[1], slot=0),
                GradientBlock(ranges[2], slot=1),
            ],
            slots=3,
        )
        for replica in range(2)
    ]
    for _ in range(2):
        grads = [torch.randn(span.numel) for span in layout.spans]
        gradient.point_to([g.data_ptr() - 4 * span.start for g, span in zip(grads, layout.spans, strict=True)])
        first, second, third = (grad.double().square().sum() for grad in grads)
        sums = [meter.measure()[:3] for meter in replicas]
        torch.testing.assert_close(sums[0] + sums[1], torch.stack([2 * second, first + 2 * third, second * 0]))
    assert [len(replica._sums) for replica in replicas] == [1, 1]
    assert all(sums._one_value_per_slot for replica in replicas for sums in replica._sums)


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("triton", [True, False])
def test_kernels_need_a_gpu_and_triton(cuda: bool, triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(norm.importlib.util, "find_spec", lambda name: name if triton else None)
    assert norm.kernels_available() is (cuda and triton)


def test_a_world_of_one_has_nothing_to_join() -> None:
    with launch({}, context=ParallelContext(), verbose=False), collectives() as called:
        assert dist.is_initialized()
        assert measured([GradientBlock(torch.ones(4))]).total().item() == 2.0
    assert called == []


@pytest.mark.parametrize(
    ("change", "suits"),
    [
        ({}, True),
        ({"p": 3.0}, False),
        ({"is_cuda": False}, False),
        ({"dtype": torch.float64}, False),
        ({"dtype": torch.bfloat16}, True),
        ({"numel": 17}, False),
        ({"contiguous": False}, False),
        ({"at": 4096 + 4}, False),
        ({"kernels": False}, False),
    ],
    ids=str,
)
def test_what_the_kernels_of_a_gpu_can_read(change, suits, monkeypatch) -> None:
    monkeypatch.setattr(norm, "kernels_available", lambda: change.get("kernels", True))

    def row(
        dtype: torch.dtype = torch.float32, numel: int = 16, at: int = 4096, contiguous: bool = True, **more: Any
    ) -> Any:
        return SimpleNamespace(
            is_cuda=more.get("is_cuda", True),
            dtype=dtype,
            numel=lambda: numel,
            data_ptr=lambda: at,
            is_contiguous=lambda: contiguous,
            element_size=lambda: dtype.itemsize,
        )

    rows = [row(), row(**{k: v for k, v in change.items() if k not in ("p", "kernels")})]
    assert norm.suits_kernel(rows, change.get("p", 2.0)) is suits


def test_the_norm_of_no_slots_is_nothing() -> None:
    none = torch.zeros(0, dtype=torch.float64)
    assert Norms(2.0, none, none).total().item() == 0.0


class _Called(TorchDispatchMode):
    """The names of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_gradients_that_are_measured_once_need_no_index_of_their_own_in_each_step(p):
    """Small and large ones mixed, of two dtypes: these operators would read a number, or copy to a device, in every step."""
    sizes = [
        (3, torch.float64),
        (1 << 18, torch.float32),
        (5, torch.float32),
        (700_001, torch.float64),
        (2, torch.float64),
    ]
    made = [torch.randn(size, dtype=dtype) for size, dtype in sizes]
    blocks = [GradientBlock(tensor, slot=at % 2) for at, tensor in enumerate(made)]
    for at in (0, 1):
        expected = torch.cat([tensor.double() for tensor in made[at::2]]).norm(p)
        assert reduce_norms(powsums(blocks, p, 2), p).per_slot()[at].item() == pytest.approx(expected.item(), rel=1e-6)
    with _Called() as called:
        powsums(blocks, p, 2)
    waits = {"repeat_interleave", "bincount", "_local_scalar_dense", "nonzero", "arange", "_pin_memory", "tensor"}
    assert not waits.intersection(called.names), called.names
