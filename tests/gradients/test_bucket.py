"""Buckets: their cut, the memory they take, and start-up checks that all ranks have the same ones."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.comm.groups import GroupMemory
from colonnade.errors import GradientError
from colonnade.gradients.bucket import MISSING, TAIL, Bucket, Buffer, GradientShard, fill
from colonnade.gradients.sums import Sharding, Sum, SyncOptions
from colonnade.gradients.synchroniser import Synchroniser
from colonnade.gradients.transport import CollectiveTransport, SharedMemoryTransport
from colonnade.testing import run_world
from tests.gradients.summing import TINY, data, reduce_all

MB = 1 << 20


def _sum(*numels: int, ranks: tuple[int, ...] = (0, 1)) -> Sum:
    parameters = tuple(nn.Parameter(torch.zeros(numel)) for numel in numels)
    return Sum(tuple(f"p{i}" for i in range(len(numels))), parameters, ranks, None, 2.0)


def test_buckets_keep_the_order_the_first_is_small_and_none_is_over_the_cap():
    one = _sum(10, 20, 30, 40, 500, 60)
    buckets = fill(one, [5, 4, 3, 2, 1, 0], cap=400, first=250, index=0)
    assert [bucket.positions for bucket in buckets] == [(5,), (4,), (3, 2, 1, 0)]
    assert [bucket.names for bucket in buckets][-1] == ("p3", "p2", "p1", "p0")


def test_room_divides_among_the_ranks_in_whole_cache_lines():
    for ranks in ((0,), (0, 1), (0, 1, 2), tuple(range(7))):
        bucket = Bucket(_sum(5, 100, ranks=ranks), [0, 1], 0)
        assert bucket.numel % (16 * len(ranks)) == 0
        tail = TAIL if len(ranks) > 1 else 0
        assert bucket.layout.numel + tail <= bucket.numel < bucket.layout.numel + tail + 16 * len(ranks)


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


class Early:
    """A transport without other ranks."""

    early = True

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def start(self) -> None: ...

    def finish(self, factor: float | Tensor) -> None:
        self._bucket.gradient.mul_(factor)


def _placed(*numels: int) -> Bucket:
    bucket = Bucket(_sum(*numels), list(range(len(numels))), 0)
    buffer = Buffer(bucket, GroupMemory(torch.ones(bucket.numel)))
    buffer.transport = Early(bucket)
    bucket.buffers.append(buffer)
    bucket.use(buffer)
    bucket.recording = True
    return bucket


def test_a_gradient_is_moved_once_and_autograd_then_adds_to_the_bucket():
    bucket = _placed(5, 100)
    bucket.begin()
    for parameter in bucket.parameters:
        assert not bucket.is_complete()
        parameter.grad = torch.ones_like(parameter)
    bucket.move_arrived()
    assert bucket.is_complete()
    versions = [view._version for view in bucket.views]
    bucket.move(range(2))
    assert [view._version for view in bucket.views] == versions
    bucket.recording = False
    bucket.begin()
    for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
        assert parameter.grad is view
        assert not bucket.is_complete()
        (2 * parameter).sum().backward()
        assert parameter.grad is view
        assert bool((view == 3).all())
    assert bucket.is_complete()
    assert bucket.collect(early=False) == {}
    bucket.send()


def test_offered_views_are_zero_and_those_that_nobody_used_are_missing():
    bucket = _placed(5, 100, 7)
    bucket.parameters[2].grad = torch.ones(7)
    bucket.recording = False
    bucket.begin()
    assert float(bucket.views[0].sum() + bucket.views[1].sum()) == 0
    (2 * bucket.parameters[0]).sum().backward()
    bucket.recording = False
    bucket.begin()
    assert not bucket.is_complete()
    assert bucket.collect(early=False) == {1: MISSING}
    bucket.send()
    assert [parameter.grad is None for parameter in bucket.parameters] == [False, True, False]
    bucket.finish(1.0)
    # Ten and seven, divided by the two of the reduction.
    assert float(bucket.views[0].sum() + bucket.views[2].sum()) == 8.5


@pytest.mark.parametrize("early", [True, False])
def test_after_a_sum_the_gradients_are_in_the_bucket_whenever_it_began(early):
    bucket = _placed(5, 100)
    for parameter in bucket.parameters:
        parameter.grad = torch.full_like(parameter, 4.0)
    bucket.begin()
    assert bucket.collect(early=early) == {}
    assert [parameter.grad is None for parameter in bucket.parameters] == [early] * 2
    bucket.send()
    bucket.finish(1.0)
    for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
        assert parameter.grad is view
        assert bool((view == 2).all())


def test_a_sum_is_divided_before_it_goes_into_a_narrower_slice():
    """The sum of fp16 gradients may be more than fp16 can hold; their mean is not."""
    for factor in (0.5, torch.tensor(0.5)):
        shard = GradientShard(torch.full((2,), torch.nan, dtype=torch.float16))
        shard.land(torch.tensor([80000.0, 1.0]), factor)
        assert shard.flat.tolist() == [40000.0, 0.5]
        shard.landed = True
        shard.land(torch.tensor([-71680.0, 1.0]), factor)
        assert shard.flat.tolist() == [4160.0, 1.0]


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


def test_a_parameter_in_two_reductions_is_refused():
    one = _sum(4, ranks=(0,))
    with pytest.raises(GradientError, match="'p0' is in two sums"):
        Synchroniser([one, Sum(("p0",), one.parameters, (0,), None, 1.0)])


def test_a_divisor_of_zero_is_refused():
    one = _sum(4, ranks=(0,))
    with pytest.raises(GradientError, match="divisor"):
        Synchroniser([Sum(one.names, one.parameters, (0,), None, 0.0)])


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
