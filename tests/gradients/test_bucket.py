"""Buckets: their cut, what they collect, note and divide, the memory they take, and the start-up check that all ranks have the same ones."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.comm.groups import GroupMemory
from colonnade.errors import GradientError
from colonnade.gradients.bucket import Bucket, Buffer, GradientShard
from colonnade.gradients.sums import Sharding, Sum, SyncOptions
from colonnade.gradients.synchroniser import Synchroniser
from colonnade.gradients.transport import CollectiveTransport, SharedMemoryTransport
from colonnade.testing import run_world
from tests.gradients.summing import TINY, data, reduce_all


class Notes:
    """A transport that only notes its calls."""

    name, early, carries = "notes", True, True

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self) -> None:
        self.calls.append("start")

    def finish(self, factor: float | Tensor) -> None:
        self.calls.append(factor)


def made(
    *numels: int, sharding: Sharding | None = None, divisor: float = 2.0, dtype: torch.dtype = torch.float32
) -> Any:
    """A bucket of parameters of so many elements, in memory that is all ones; of rank 0 of 2."""
    parameters = tuple(nn.Parameter(torch.zeros(numel, dtype=dtype)) for numel in numels)
    names = tuple(f"p{at}" for at in range(len(numels)))
    bucket = Bucket(Sum(names, parameters, (0, 1), None, divisor, sharding=sharding), range(len(numels)), 0)
    buffer = Buffer(bucket, GroupMemory(torch.ones(bucket.numel, dtype=dtype)))
    buffer.transport = Notes()
    bucket.use(buffer)
    return bucket


# -- the slice that a rank owns ---

DTYPES = [torch.float64, torch.float32, torch.float16]


@pytest.mark.parametrize("factor", [1.0, 0.5, torch.tensor(0.5)], ids=str)
@pytest.mark.parametrize("into", DTYPES)
@pytest.mark.parametrize("total", DTYPES)
@pytest.mark.parametrize("landed", [False, True])
def test_a_total_lands_times_its_factor(landed, total, into, factor):
    shard = GradientShard(torch.tensor([9.0, 2.0, 3.0, 9.0], dtype=into))
    shard.landed = landed
    shard.land(torch.tensor([4.0, 6.0], dtype=total), factor, start=1)
    there = torch.tensor([2.0, 3.0]) if landed else torch.zeros(2)
    middle = there + torch.tensor([4.0, 6.0]) * float(factor)
    assert shard.flat.tolist() == [9.0, *middle.tolist(), 9.0]


def test_a_new_slice_has_nothing_and_takes_a_narrower_total_in_its_own_digits():
    shard = GradientShard(torch.full((2,), 9.0))
    assert shard.landed is False
    shard.land(torch.ones(2, dtype=torch.float16), 1 / 3)
    assert torch.equal(shard.flat, torch.full((2,), 1 / 3))


@pytest.mark.parametrize("factor", [0.001, torch.tensor(0.001)], ids=str)
@pytest.mark.parametrize("landed", [False, True])
def test_a_sum_that_is_too_large_for_the_slice_is_divided_before_it_lands(landed, factor):
    shard = GradientShard(torch.zeros(1, dtype=torch.float16))
    shard.landed = landed
    shard.land(torch.tensor([1e6]), factor)
    assert shard.flat.item() == 1000.0


def test_of_two_types_as_wide_the_factor_comes_after() -> None:
    shard = GradientShard(torch.zeros(1, dtype=torch.bfloat16))
    shard.land(torch.tensor([60000.0], dtype=torch.float16), 4.0)
    assert shard.flat.item() == torch.tensor(60000.0).bfloat16().item() * 4


# -- in a synchroniser ---

MB = 1 << 20


@pytest.mark.parametrize("overlap", ["auto", True, False])
@pytest.mark.parametrize("between_stages", [True, False])
@pytest.mark.parametrize("takes_turns", [True, False])
def test_what_starts_early(overlap, between_stages, takes_turns):
    whole = made(5).sum
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


TWO = tuple(nn.Parameter(torch.zeros(4, width)) for width in (2, 3))
ALIKE = {
    "names": ("a", "b"),
    "parameters": TWO,
    "labels": ("x", "y"),
    "divisor": 2.0,
    "options": TINY,
    "sharding": None,
}
UNLIKE: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"names": ("c", "d")}, ""),  # what is tied between stages has a name on each
    (
        {"parameters": (TWO[0], nn.Parameter(torch.zeros(5, 3)))},
        "'b' is (4, 3) torch.float32 cpuy, 'b' is (5, 3) torch",
    ),
    (
        {"parameters": tuple(p.bfloat16() for p in TWO)},
        "'a' is (4, 2) torch.float32 cpux, 'a' is (4, 2) torch.bfloat16 cpu",
    ),
    ({"labels": ("x", "z")}, "'b' is (4, 3) torch.float32 cpuy, 'b' is (4, 3) torch.float32 cpuz"),
    ({"divisor": 3.0}, "ranks 0 and 1 would not sum the same gradients: 'divisor' is 2, 'divisor' is 3"),
    ({"options": replace(TINY, bucket_mb=0.5)}, "bucket_mb=0.5"),
    ({"sharding": Sharding()}, "'options' is"),
    ({"names": ("a",), "parameters": TWO[:1], "labels": ("x",)}, "the first that only one of them has is 'b'"),
]
"""What rank 1 has otherwise than rank 0, and the error on both."""


def _unlike() -> list[str]:
    found = []
    for changes, _ in UNLIKE:
        mine = ALIKE | (changes if dist.get_rank() == 1 else {})
        try:
            Synchroniser([Sum(ranks=(0, 1), group=dist.group.WORLD, **mine)]).close()
            found.append("")
        except GradientError as error:
            found.append(str(error))
    return found


def test_ranks_that_would_reduce_other_things_stop_before_the_first_step():
    first, second = run_world(2, _unlike).values
    assert first == second
    for found, (changes, message) in zip(first, UNLIKE, strict=True):
        assert message in found, changes
        assert bool(message) == bool(found), changes


def test_one_rank_and_no_group_only_divides():
    one = replace(made(4, 3).sum, ranks=(0,))
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
    one = made(3).sum
    with pytest.raises(GradientError) as caught:
        Synchroniser([replace(one, ranks=(0, 1, 2), group=group)])
    return str(caught.value)


def test_a_group_of_other_ranks_is_refused():
    for said in run_world(3, _wrong_group).values[:2]:
        assert "over ranks [0, 1, 2], but its process group has ranks [0, 1]" in said
