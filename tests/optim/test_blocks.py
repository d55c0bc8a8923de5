"""Slices of replicated blocks make up the block once; buckets are merged only where that stays true."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.errors import GradientError
from colonnade.optim import bucket_step, norm
from colonnade.optim.norm import (
    UNIT,
    GradientBlock,
    bucket_blocks,
    check_order,
    chunk_table,
    on_device,
    padded,
    to_device,
)
from colonnade.parallel.flat import FlatLayout


def test_slices_are_even_and_views() -> None:
    tensor = torch.arange(64.0 * 100).view(100, 64)
    slices = [GradientBlock(tensor, 4, index).owned for index in range(4)]
    assert [len(s) for s in slices] == [1600] * 4
    assert all(s.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for s in slices)


def bucket(*numels: int) -> tuple[FlatLayout, torch.Tensor]:
    layout = FlatLayout([torch.zeros(n) for n in numels])
    return layout, torch.arange(float(layout.numel))


def starts(blocks: list[GradientBlock]) -> list[tuple[int, int]]:
    return [(b.tensor.storage_offset(), b.tensor.numel()) for b in blocks]


def test_neighbours_with_one_holding_and_slot_become_one_block() -> None:
    layout, buffer = bucket(5, 20, 16, 3)
    whole = bucket_blocks(layout, buffer, [(2, 1)] * 4)
    assert starts(whole) == [(0, layout.numel)]
    assert (whole[0].count, whole[0].index) == (2, 1)
    by_slot = bucket_blocks(layout, buffer, [(2, 1)] * 4, [0, 0, 1, 0])
    assert starts(by_slot) == [(0, 48), (48, 16), (64, 16)]
    by_holding = bucket_blocks(layout, buffer, [(2, 1), (1, 0), (1, 0), (2, 1)])
    assert [b.count for b in by_holding] == [2, 1, 2]


def test_absent_and_tied_members_stand_apart() -> None:
    layout, buffer = bucket(5, 20, 16, 3)
    assert starts(bucket_blocks(layout, buffer, [(1, 0)] * 4, absent=[1])) == [(0, 16), (48, 32)]
    assert starts(bucket_blocks(layout, buffer, [(2, 0)] * 4, separate=[1])) == [(0, 16), (16, 32), (48, 32)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 300)), min_size=1, max_size=6))
def test_chunks_cover_every_span_once(sizes: list[tuple[int, int]]) -> None:
    spans, end = [], 0
    for gap, numel in sizes:
        start = end + gap * UNIT
        spans.append((start, start + numel))
        end = padded(start + numel, torch.float32)
    table = chunk_table(spans, 64, torch.device("cpu"))
    seen: dict[int, list[int]] = {}
    for start, stop, owner in table.tolist():
        assert 0 < (stop - start) * UNIT <= 64
        seen.setdefault(owner, []).extend(range(start * UNIT, stop * UNIT))
    for owner, (start, stop) in enumerate(spans):
        assert seen[owner] == list(range(start, -(-stop // UNIT) * UNIT))


def test_sizes_fit_what_a_gpu_loads_at_once() -> None:
    assert UNIT * torch.bfloat16.itemsize == bucket_step._ALIGNED == 16  # bytes
    assert norm.SLICE == 64  # a whole number of cache lines
    assert norm.CHUNK % norm.STEP_CHUNK == norm.STEP_CHUNK % UNIT == 0 < norm.CHUNK
    assert 0 < norm.ROW < norm.SMALL // 4 < norm.LARGE < norm.PIECE


def test_a_table_goes_to_a_gpu_through_pinned_memory() -> None:
    cuda, host = torch.device("cuda", 0), torch.zeros(2)
    pinned = SimpleNamespace(to=lambda device, non_blocking: (device, non_blocking))
    assert to_device(SimpleNamespace(pin_memory=lambda: pinned), cuda) == (cuda, True)  # type: ignore[arg-type]
    assert to_device(host, torch.device("cpu")) is host


def test_another_gpu_than_the_current_one_becomes_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for free in ("cpu", "cuda", "cuda:1"):
        assert isinstance(on_device(torch.device(free)), nullcontext)
    other = on_device(torch.device("cuda:0"))
    assert isinstance(other, torch.cuda.device)
    assert other.idx == 0


@pytest.mark.parametrize("p", [1e-9, 0.5, 1, 32, 32.0, math.inf])
def test_orders_that_are_a_norm(p: float) -> None:
    assert check_order(p) == p


@pytest.mark.parametrize("p", [0, -1, math.nan, 32.5, 33, 10**400])
def test_orders_that_are_no_norm(p: float) -> None:
    with pytest.raises(GradientError, match="above 0 and at most 32, or inf"):
        check_order(p)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"count": 2, "index": 2}, "a block has 2 replicas and index 2; the index must be from 0 to 1"),
        ({"count": 2, "index": -1}, "a block has 2 replicas and index -1; the index must be from 0 to 1"),
        ({"slot": -1}, "a slot must be 0 or larger, not -1"),
    ],
)
def test_what_is_no_block_is_said(more: dict[str, int], message: str) -> None:
    with pytest.raises(GradientError) as error:
        GradientBlock(torch.ones(2), **more)
    assert str(error.value).startswith(message)
    GradientBlock(torch.ones(2), count=2, index=1, slot=1)
    assert GradientBlock(torch.ones(200), count=2, index=None).owned.numel() == 200
