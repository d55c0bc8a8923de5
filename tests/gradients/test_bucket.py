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
from colonnade.gradients import bucket as bucket_module
from colonnade.gradients.bucket import MISSING, SPARSE, TAIL, Bucket, Buffer, GradientShard
from colonnade.gradients.sums import Sharding, Sum, SyncOptions
from colonnade.gradients.synchroniser import Synchroniser
from colonnade.gradients.transport import CollectiveTransport, SharedMemoryTransport
from colonnade.parallel.flat import ALIGN_BYTES
from colonnade.testing import run_world
from tests.gradients.summing import TINY, data, reduce_all

STEP = ALIGN_BYTES // 4
STAGED = Sharding(keep_full=False)


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


def come(bucket: Any, *values: float | None) -> None:
    """Gradients of these values, each in memory of its own; None for none."""
    for parameter, value in zip(bucket.parameters, values, strict=True):
        parameter.grad = None if value is None else torch.full_like(parameter, value)


def sparse(parameter: nn.Parameter) -> Tensor:
    return torch.sparse_coo_tensor([[1]], [3.0], parameter.shape)


def inside(bucket: Any) -> list[float | None]:
    """What the view of each parameter is filled with; None for several values."""
    return [view[0].item() if bool((view == view[0]).all()) else None for view in bucket.views]


@pytest.mark.parametrize(
    ("ranks", "sharding", "room"),
    [(1, None, 0), (2, None, TAIL), (2, Sharding(), 0), (1, Sharding(), 0), (3, None, TAIL)],
)
def test_there_is_room_behind_the_gradients_where_numbers_may_ride(ranks, sharding, room):
    for numel in (8, STEP * ranks - TAIL, STEP * ranks - TAIL + 1, STEP * ranks):
        parameter = nn.Parameter(torch.zeros(numel))
        bucket = Bucket(Sum(("a",), (parameter,), tuple(range(ranks)), None, 2.0, sharding=sharding), [0], 0)
        least = bucket.layout.numel + room
        assert least <= bucket.numel < least + STEP * ranks
        assert bucket.numel % (STEP * ranks) == 0


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_slices_of_the_ranks_are_neighbours_and_what_is_used_of_them_makes_up_the_layout(ranks):
    parameters = tuple(nn.Parameter(torch.zeros(numel)) for numel in (3, 20, 1))
    one = Sum(("a", "b", "c"), parameters, tuple(range(ranks)), None, 2.0, sharding=Sharding())
    buckets = [Bucket(one, [0, 1, 2], index) for index in range(ranks)]
    assert [bucket.own.start for bucket in buckets] == [0, *(bucket.own.stop for bucket in buckets[:-1])]
    assert buckets[-1].own.stop == buckets[0].numel
    assert sum(bucket.used for bucket in buckets) == buckets[0].layout.numel == 4 * STEP
    for bucket in buckets:
        assert all(span.numel > 0 for span in bucket.spans)
        assert all(span.at + span.numel <= bucket.used for span in bucket.spans)
        assert (bucket.used == 0) is (not bucket.spans)
    even = replace(one, names=("a", "b"), parameters=tuple(nn.Parameter(torch.zeros(STEP)) for _ in range(2)))
    assert [len(Bucket(even, [0, 1], index).spans) for index in range(ranks)] == [[2], [1, 1], [1, 1, 0]][ranks - 1]
    whole = Bucket(Sum(("a", "b", "c"), parameters, tuple(range(ranks)), None, 2.0), [0, 1, 2], 0)
    assert (whole.own, whole.used) == (slice(0, whole.numel), whole.layout.numel)
    assert [(span.start, span.stop, span.at) for span in whole.spans] == [(0, 3, 0), (0, 20, STEP), (0, 1, 3 * STEP)]


def test_which_buckets_carry_numbers_and_which_carry_counts():
    for carries in (True, False):
        for dtype, exact in ((torch.float32, True), (torch.float64, True), (torch.bfloat16, False)):
            bucket = made(5, dtype=dtype)
            bucket.transport.carries = carries
            assert (bucket.carries, bucket.carries_counts) == (carries, carries and exact)
            bucket.shard = GradientShard(torch.zeros(5, dtype=dtype))
            assert (bucket.carries, bucket.carries_counts) == (False, False)
    bucket = made(5)
    bucket.tail.fill_(7)
    assert bucket.buffer.flat.tolist() == [1] * STEP + [7] * TAIL + [1] * (STEP - TAIL)


def test_after_a_step_what_was_set_to_none_is_offered_again():
    bucket = made(5, 6)
    bucket.begin()
    for parameter in bucket.parameters:
        (4 * parameter).sum().backward()
    assert bucket.collect(early=False) == {}
    bucket.send()
    bucket.finish(1.0)
    bucket.parameters[1].grad = None
    bucket.begin()
    assert bucket.parameters[1].grad is bucket.grads[1]
    assert inside(bucket) == [4, 0]
    (4 * bucket.parameters[0]).sum().backward()
    assert bucket.collect(early=False) == {1: MISSING}  # it was offered, and nobody wrote to it
    assert bucket.parameters[1].grad is None


def test_views_that_were_given_other_memory_are_made_anew_and_others_are_left():
    bucket = made(5, 6)
    bucket.begin()
    before = list(bucket.views)
    bucket.begin()
    assert all(now is view for now, view in zip(bucket.views, before, strict=True))
    bucket.views[1].data = torch.zeros(6)
    bucket.begin()
    assert bucket.views[1] is not before[1]
    assert bucket.views[1].data_ptr() == bucket.buffer.flat.data_ptr() + 4 * STEP


@pytest.mark.parametrize("numels", [(5,), (5, 6)])
def test_a_bucket_is_complete_when_all_that_is_expected_was_written_to(numels):
    bucket = made(*numels)
    bucket.begin()
    for parameter in bucket.parameters:
        assert not bucket.is_complete()
        (2 * parameter).sum().backward()
    assert bucket.is_complete()
    bucket.begin()  # the next pass writes to all of them again
    assert not bucket.is_complete()
    bucket.expected = []
    assert bucket.is_complete()


def test_where_starting_early_is_of_no_use_a_bucket_is_never_complete():
    bucket = made(5, 6)
    bucket.transport.early = False
    bucket.begin()
    for parameter in bucket.parameters:
        (2 * parameter).sum().backward()
    assert not bucket.is_complete()


def test_large_gradients_are_not_offered_and_moved_when_the_bucket_is_full(monkeypatch):
    monkeypatch.setattr(bucket_module, "LARGE_BYTES", 20)
    bucket = made(5, 6)
    bucket.begin()
    assert [parameter.grad for parameter in bucket.parameters] == [None, None]  # they are not offered
    come(bucket, 3, 4)
    assert not bucket.is_complete()  # a question moves nothing
    bucket.move_arrived()
    assert bucket.is_complete()
    assert inside(bucket) == [3, 4]


def test_buckets_that_take_turns_are_complete_when_all_that_is_expected_is_there():
    bucket = made(5, 6, 7, sharding=STAGED)
    bucket.begin()
    bucket.expected = [0, 2]
    for values, complete in (((None,) * 3, False), ((1, 1, None), False), ((1, None, 1), True)):
        come(bucket, *values)
        assert bucket.is_complete() is complete


@pytest.mark.parametrize(
    ("sharding", "device", "large"),
    [(None, "cpu", [1, 2]), (Sharding(), "cpu", [1, 2]), (STAGED, "cpu", []), (None, "meta", [])],
)
def test_which_gradients_are_large(monkeypatch, sharding, device, large):
    monkeypatch.setattr(bucket_module, "LARGE_BYTES", 40)
    with torch.device(device):
        bucket = made(9, 10, 11, 2, sharding=sharding)
    assert bucket.positions == ((0, 3, 1, 2) if large else (0, 1, 2, 3))
    assert bucket.names == tuple(f"p{at}" for at in bucket.positions)


def test_gradients_are_moved_once_and_sparse_ones_stay_where_they_are():
    bucket = made(5, 6, 7)
    come(bucket, 3, 4, None)
    bucket.parameters[1].grad = unlike = sparse(bucket.parameters[1])
    bucket.move(range(3))
    assert inside(bucket) == [3, 1, 1]
    assert [bucket.parameters[0].grad is bucket.grads[0], bucket.parameters[1].grad is unlike] == [True, True]
    assert bucket.parameters[2].grad is None
    version = bucket.views[0]._version
    bucket.move([0])
    assert bucket.views[0]._version == version
    assert [grad for grad, _ in bucket.written()] == [parameter.grad for parameter in bucket.parameters]
    before = bucket.written()
    bucket.parameters[0].grad.add_(1)
    assert [one[1] == other[1] for one, other in zip(before, bucket.written(), strict=True)] == [False, True, True]


def test_what_is_missing_or_sparse_is_zero_in_the_bucket_and_noted():
    bucket = made(5, 6, 7, 8)
    bucket.recording = True
    bucket.begin()
    come(bucket, 3, None, None, 4)
    bucket.parameters[2].grad = unlike = sparse(bucket.parameters[2])
    assert bucket.collect(early=True) == {1: MISSING, 2: SPARSE}
    assert inside(bucket) == [3, 0, 0, 4]
    assert [parameter.grad for parameter in bucket.parameters] == [None, None, unlike, None]
    late = bucket.parameters[3].grad = torch.ones(8)
    bucket.finish(1.0)
    assert bucket.parameters[0].grad is bucket.grads[0]
    assert [parameter.grad for parameter in bucket.parameters[1:]] == [None, unlike, late]
    come(bucket, None, 1, 1, 1)  # in the next step others are missing, and nothing that was offered counts
    bucket.recording = False
    bucket.begin()
    assert bucket.collect(early=False) == {0: MISSING}


def test_buckets_that_take_turns_copy_all_and_let_go():
    bucket = made(5, 6, 7, sharding=STAGED)
    come(bucket, 3, None, None)
    bucket.parameters[2].grad = unlike = sparse(bucket.parameters[2])
    assert bucket.collect(early=False) == {1: MISSING, 2: SPARSE}
    assert inside(bucket) == [3, 0, 0]
    assert [parameter.grad for parameter in bucket.parameters] == [None, None, unlike]
    assert bucket.buffer.flat.sum() == 15  # of what was there before nothing is left
    bucket.shard = GradientShard(torch.zeros(bucket.used))
    bucket.finish(1.0)
    assert bucket.shard.landed
    assert [parameter.grad for parameter in bucket.parameters] == [None, None, unlike]
    none = made(5, sharding=STAGED)
    assert none.collect(early=True) == {0: MISSING}
    full = made(STEP, 2 * STEP, sharding=STAGED)  # without gaps
    come(full, 2, 3)
    assert full.collect(early=True) == {}
    assert inside(full) == [2, 3]


def test_a_sum_that_has_ended_can_be_multiplied():
    bucket = made(5)
    for factor in (0.5, torch.tensor(4.0, dtype=torch.float64)):
        bucket.rescale(factor)
    assert bucket.gradient.tolist() == [2.0] * STEP
    assert bucket.buffer.flat[STEP:].tolist() == [1.0] * STEP
    bucket.shard = GradientShard(torch.ones(3))
    bucket.rescale(3.0)
    assert bucket.gradient.tolist() == [3.0] * 3


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
        assert "over ranks [0, 1, 2] has the process group of ranks [0, 1]" in said
