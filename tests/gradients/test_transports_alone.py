"""Transports in one process: sums in memory of two ranks, and what options come to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade.comm.groups import GroupMemory
from colonnade.gradients import transport as transport_module
from colonnade.gradients.bucket import Bucket, GradientShard
from colonnade.gradients.sums import Sharding, Sum, SyncOptions
from colonnade.gradients.transport import CollectiveTransport, SharedMemoryTransport

F16, B16, F32, F64, C64 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64


def bucket_of(numel: int, dtype: torch.dtype, index: int = 0, ranks: int = 2, **more: Any) -> Any:
    parameter = nn.Parameter(torch.zeros(numel, dtype=dtype))
    bucket = Bucket(Sum(("a",), (parameter,), tuple(range(ranks)), None, float(ranks), **more), [0], index)
    if bucket.is_sharded:
        bucket.shard = GradientShard(torch.zeros(bucket.used, dtype=F32 if bucket.sum.sharding.wide else dtype))
    return bucket


def group_of(index: int, ranks: int = 2, said: list[Any] | None = None) -> Any:
    said = [] if said is None else said
    return SimpleNamespace(
        size=ranks, index=index, alone=ranks == 1, signal=said.append, collect=lambda: said.append("collected")
    )


@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("numel", [5, 30_000])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("dtype", "options"), [(F32, {}), (F64, {}), (C64, {}), (B16, {}), (F16, {}), (B16, {"reduce_dtype": F32})]
)
def test_each_rank_sums_its_slice_into_the_memory_of_all(monkeypatch, dtype, options, ranks, numel, factor):
    monkeypatch.setattr(transport_module, "_CACHE_BYTES", 1)  # the smallest pieces
    buckets = [bucket_of(numel, dtype, index, ranks, options=SyncOptions(**options)) for index in range(ranks)]
    every = [torch.arange(buckets[0].numel).remainder(7).add(at + 1).to(dtype) for at in range(ranks)]
    wide = torch.complex128 if dtype is C64 else F64
    expected = (sum(one.to(wide) for one in every) * factor).to(dtype)
    said: list[Any] = []
    for index, bucket in enumerate(buckets):
        transport = SharedMemoryTransport(bucket, GroupMemory(every[index], every), group_of(index, ranks, said))
        assert transport.reduced_in is (F32 if dtype is C64 else bucket.sum.options.sum_dtype(dtype))
        transport.start()
        transport.finish(factor)
    assert all(torch.equal(one, expected) for one in every)
    assert said == []  # they tell each other once for all buckets


@pytest.mark.parametrize(
    ("options", "dtype", "sharding", "carries", "reduced_in"),
    [
        ({}, F32, None, True, F32),
        ({}, F32, Sharding(), False, F32),
        ({}, B16, None, True, B16),
        ({}, F16, None, False, F32),
        ({"reduce_dtype": F32}, B16, None, False, F32),
        ({"fixed_order": True}, F32, None, False, F32),
        ({"compress": B16}, F32, None, False, B16),
        ({"compress": B16, "reduce_dtype": F64}, F32, None, False, B16),
        ({"fixed_order": True}, B16, Sharding(wide=True), False, F32),
        ({"fixed_order": True}, F64, Sharding(), False, F64),
        ({}, B16, Sharding(wide=True), False, B16),
        ({}, C64, None, True, F32),
    ],
)
def test_what_options_come_to_over_a_process_group(options, dtype, sharding, carries, reduced_in):
    bucket = bucket_of(5, dtype, options=SyncOptions(**options), sharding=sharding)
    transport = CollectiveTransport(bucket, GroupMemory(torch.zeros(bucket.numel, dtype=dtype)), group_of(0))
    assert transport.carries is carries
    assert transport.reduced_in is reduced_in
    assert transport.early
    assert transport.host_waits
    assert CollectiveTransport.serves(group_of(0), torch.device("cpu"))
