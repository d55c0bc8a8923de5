"""One sum at run time, in one process: its buckets and their memory, the order of gradients, and the notes about them."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.gradients.bucket import (
    MISSING,
    SPARSE,
    fill,
    in_starting_order,
    last_over_ranks,
)
from colonnade.gradients.sums import Sharding, Sum, SyncOptions
from colonnade.gradients.uneven import SumState

MB = 1 << 20


class Two:
    """Rank 4 of (4, 6), whose peer says the same unless it is told something else."""

    ranks, size, index, alone, sockets, group = (4, 6), 2, 0, False, None, None

    def __init__(self) -> None:
        self.under_way: deque[Any] = deque()
        self.other: Any = None

    def gather_bytes(self, own: bytes) -> list[bytes]:
        return [own, own if self.other is None else self.other]

    def gather_objects(self, own: Any) -> list[Any]:
        return [own if self.other is None else self.other, own]


def sum_of(*numels: int, frozen: tuple[int, ...] = (), dtype: torch.dtype = torch.float32, **more: Any) -> Sum:
    """One bucket for every 64 bytes, the first for 32."""
    parameters = tuple(nn.Parameter(torch.zeros(n, dtype=dtype), at not in frozen) for at, n in enumerate(numels))
    options = SyncOptions(bucket_mb=64 / MB, first_bucket_mb=32 / MB, **more.pop("options", {}))
    return Sum(tuple(f"p{at}" for at in range(len(numels))), parameters, (4, 6), None, 2.0, options, **more)


def state_of(*numels: int, **more: Any) -> SumState:
    return SumState(sum_of(*numels, **more), Two())  # type: ignore[arg-type]


def sparse(parameter: Tensor) -> Tensor:
    return torch.sparse_coo_tensor([[1]], [3.0], parameter.shape)


def test_buckets_are_cut_at_their_sizes_in_the_reverse_of_the_models_order():
    one = sum_of(10, 10, 10, 30, 2)
    cut = {
        (80, 40): [(0,), (1, 2), (3,), (4,)],
        (80, 39): [(0,), (1, 2), (3,), (4,)],
        (80, 1000): [(0, 1), (2,), (3,), (4,)],
        (128, 1): [(0,), (1, 2), (3, 4)],
    }
    for (cap, first), positions in cut.items():
        assert [bucket.positions for bucket in fill(one, range(5), cap, first, 0)] == positions
    assert fill(one, [], 80, 40, 0) == []
    state = state_of(8, 8, 8, 8)
    assert [bucket.positions for bucket in state.buckets] == [(3,), (2, 1), (0,)]
    assert state.laid_out == state.buckets
    assert state.places == {
        3: (state.buckets[0], 0),
        2: (state.buckets[1], 0),
        1: (state.buckets[1], 1),
        0: (state.buckets[2], 0),
    }
    assert all(bucket.recording for bucket in state.buckets)


def test_buckets_of_several_sums_start_in_one_order():
    """By how far through its sum each ends, then by ranks; the last over each set of ranks waits for the end of backward."""

    def buckets(ranks: tuple[int, ...], *sizes: int) -> list[Any]:
        return [SimpleNamespace(sum=SimpleNamespace(ranks=ranks), numel=size, at=at) for at, size in enumerate(sizes)]

    one, other, none = buckets((0, 1), 32, 64, 32), buckets((0, 2), 50, 50), buckets((0,), 0)
    ordered = in_starting_order([other, one, none])
    ends = [(1, one[0]), (2, other[0]), (3, one[1]), (4, one[2]), (5, other[1])]
    assert [bucket for bucket in ordered if bucket is not none[0]] == [bucket for _, bucket in ends]
    assert ordered[0] is none[0]
    assert {id(bucket) for bucket in last_over_ranks(ordered)} == {id(one[2]), id(other[1]), id(none[0])}


def test_a_gradient_is_missing_from_a_step_if_it_is_from_all_its_passes():
    state = state_of(8, 8, 8, sharding=Sharding(keep_full=False, every_pass=True))
    for values in ([1.0, None, None], [None, None, 1.0]):
        for parameter, value in zip(state.sum.parameters, values, strict=True):
            parameter.grad = None if value is None else torch.full_like(parameter, value)
        for bucket in state.buckets:
            state.collect(bucket, early=True)
    state.open_notes(failed=False)
    assert state.close_notes() == bytes([0, MISSING, 0])
    state.open_notes(failed=False)
    assert state.close_notes() == bytes(3)  # said once
    for made in (sparse, torch.ones_like):
        for parameter in state.sum.parameters:
            parameter.grad = made(parameter)
        for bucket in state.buckets:
            state.collect(bucket, early=True)
    state.open_notes(failed=False)
    assert state.close_notes() == bytes([SPARSE] * 3)
