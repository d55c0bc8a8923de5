"""One sum in one process: the cut and the order of its buckets, and notes about gradients that are missing, late, sparse or outside."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade.comm.groups import RankGroup
from colonnade.errors import GradientError
from colonnade.gradients.bucket import (
    MISSING,
    OUTSIDE,
    SPARSE,
    fill,
    in_starting_order,
    last_over_ranks,
)
from colonnade.gradients.sums import Sharding, Sum, SyncOptions
from colonnade.gradients.synchroniser import Synchroniser
from colonnade.gradients.uneven import SumState, finish_uneven

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


# -- notes, and what follows from them ---
def test_what_lies_beside_a_sharded_bucket_goes_into_the_owned_slice_alone():
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(20))]
    reducer = Synchroniser([Sum(("p0", "p1"), tuple(weights), (0,), None, 2.0, sharding=Sharding())])
    (bucket,) = reducer.buckets
    bucket.gradient.fill_(1.0)
    one = SimpleNamespace(
        sum=bucket.sum, group=RankGroup((0,), None), places={p: (bucket, i) for i, p in enumerate(bucket.positions)},
        buckets=[bucket],
    )  # fmt: skip
    weights[0].grad, weights[1].grad = torch.full((3,), 6.0), torch.full((20,), 8.0)
    assert finish_uneven(one, [bytes([OUTSIDE, 0])], 0.5) == {}
    parts = {bucket.names[span.index]: bucket.gradient[span.at : span.at + span.numel] for span in bucket.spans}
    assert {name: part.unique().tolist() for name, part in parts.items()} == {"p0": [4.0], "p1": [1.0]}
    assert weights[0].grad is None
    # Missing on this rank: nothing is attached. Sparse gradients are refused.
    assert finish_uneven(one, [bytes([0, MISSING])], 0.5) == {}
    assert weights[1].grad.tolist() == [8.0] * 20
    with pytest.raises(GradientError, match="'p0' is sparse, and ZeRO"):
        finish_uneven(one, [bytes([SPARSE, 0])], 0.5)


def test_gradients_without_a_bucket_of_several_types_are_summed_and_kept_apart():
    parameters = (
        nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, dtype=torch.float64)), nn.Embedding(4, 2, sparse=True).weight,
    )  # fmt: skip
    sum_ = Sum(("a", "b", "c"), parameters, (0,), None, 2.0, SyncOptions(reduce_dtype=torch.bfloat16))
    one = SimpleNamespace(sum=sum_, group=RankGroup((0,), None), places={}, buckets=[])
    parameters[0].grad, parameters[1].grad = torch.full((3,), 6.0), None
    parameters[2].grad = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), (4, 2))
    assert finish_uneven(one, [bytes([OUTSIDE, OUTSIDE, OUTSIDE | SPARSE])], 0.5) == {}
    assert [parameter.grad.dtype for parameter in parameters] == [torch.float32, torch.float64, torch.float32]
    assert parameters[0].grad.tolist() == [3.0] * 3
    assert parameters[1].grad.tolist() == [0.0] * 2
    assert parameters[2].grad.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]
