"""Buckets: their cut, the memory they take, and start-up checks that all ranks have the same ones."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colonnade.comm.rank_group import GroupMemory
from colonnade.errors import GradientError
from colonnade.gradients.bucket import Bucket
from colonnade.gradients.sums import Sharding, Sum, SyncOptions
from colonnade.gradients.synchroniser import Synchroniser
from colonnade.gradients.transport import CollectiveTransport, SharedMemoryTransport
from colonnade.testing import run_world
from tests.gradients.summing import TINY, data, reduce_all

MB = 1 << 20


def _sum(*numels: int, ranks: tuple[int, ...] = (0, 1)) -> Sum:
    parameters = tuple(nn.Parameter(torch.zeros(numel)) for numel in numels)
    return Sum(tuple(f"p{i}" for i in range(len(numels))), parameters, ranks, None, 2.0)


@pytest.mark.parametrize("overlap", ["auto", True, False])
@pytest.mark.parametrize("between_stages", [True, False])
@pytest.mark.parametrize("takes_turns", [True, False])
def test_what_starts_early(overlap, between_stages, takes_turns):
    whole = _sum(5)
    sharding = Sharding(keep_full=False) if takes_turns else None
    one = replace(whole, options=SyncOptions(overlap=overlap), between_stages=between_stages, sharding=sharding)
    bucket = Bucket(one, [0], 0)
    memory = torch.zeros(bucket.numel)
    group = SimpleNamespace(size=2, index=0)
    early = overlap is not False and not between_stages
    assert SharedMemoryTransport(bucket, GroupMemory(memory, [memory, memory]), group).early == (early and takes_turns)
    assert CollectiveTransport(bucket, GroupMemory(memory), group).early == early


def _peak(steps: int, run) -> int:
    """The most bytes at once in a few steps, beyond what was there before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        for _ in range(steps):
            run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def _extra_memory() -> list[tuple[int, int]]:
    return [_extra_memory_over(shared) for shared in (True, False)]


def _extra_memory_over(shared: bool) -> tuple[int, int]:
    """Peak beside the gradients themselves, and the largest bucket."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(24)))
    x = data(dist.get_rank(), 0, 2, 256).float()
    options = SyncOptions(bucket_mb=1.0, first_bucket_mb=0.3, shared_memory=shared)
    reducer = reduce_all(model, options)

    def step(micro_batches: int) -> None:
        model.zero_grad(set_to_none=True)
        for micro in range(micro_batches):
            reducer.prepare(last=micro == micro_batches - 1)
            model(x).square().mean().backward()
        reducer.wait()

    # The memory of the buckets was taken before the profile begins: what is seen here is beside it.
    peak = max(_peak(3, lambda: step(1)), _peak(3, lambda: step(2)))
    assert sum(bucket.buffer.flat.nbytes for bucket in reducer.buckets) > 6 * MB
    return peak, max(bucket.buffer.flat.nbytes for bucket in reducer.buckets)


@pytest.mark.slow
def test_extra_memory_is_at_most_one_bucket_and_activations():
    activations = 24 * 4 * 2 * 256 * 4
    for transports in run_world(2, _extra_memory).values:
        for peak, bucket in transports:
            assert bucket <= 1.05 * MB
            assert peak <= bucket + activations + 300_000


def _different(kind: str) -> None:
    rank = dist.get_rank()
    wide = 5 if kind == "shape" and rank == 1 else 4
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, wide))
    if kind == "dtype" and rank == 1:
        model[1].to(torch.bfloat16)
    if kind == "count" and rank == 1:
        model.append(nn.Linear(2, 2))
    reduce_all(model, TINY, bucket_mb=0.5 if kind == "options" and rank == 1 else 1.0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shape", "'1.weight' is (4, 4) torch.float32 cpu, '1.weight' is (5, 4) torch.float32 cpu"),
        ("dtype", "'1.weight' is (4, 4) torch.float32 cpu, '1.weight' is (4, 4) torch.bfloat16 cpu"),
        ("count", "the first that only one of them has is '2.weight'"),
        ("options", "bucket_mb=1.0"),
    ],
)
def test_ranks_that_would_reduce_other_things_stop_before_the_first_step(kind, message):
    outcomes = run_world(2, _different, kind, check=False).outcomes
    assert [outcome.type for outcome in outcomes] == ["colonnade.errors.GradientError"] * 2
    assert all(message in outcome.message for outcome in outcomes), outcomes[0].message


def test_one_rank_and_no_group_only_divides():
    one = _sum(4, 3, ranks=(0,))
    reducer = Synchroniser([one])
    for _ in range(2):
        reducer.prepare(last=True)
        for parameter in one.parameters:
            parameter.grad = None
            (6 * parameter).sum().backward()
        reducer.wait()
    assert all(bool((parameter.grad == 3).all()) for parameter in one.parameters)
    assert str(reducer.buckets[0]) == "32 x float32 over ranks [0] / 2 by local: p1, p0"
    Synchroniser([]).wait()


def _wrong_group() -> str:
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return ""
    one = _sum(3, ranks=(0, 1, 2))
    with pytest.raises(GradientError) as caught:
        Synchroniser([Sum(one.names, one.parameters, one.ranks, group, 3.0)])
    return str(caught.value)


def test_a_group_of_other_ranks_is_refused():
    for said in run_world(3, _wrong_group).values[:2]:
        assert "over ranks [0, 1, 2] has the process group of ranks [0, 1]" in said
