"""One bucket in one process: what is offered, moved, divided, noted and let go of, with a transport that only notes its calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade.comm.groups import GroupMemory
from colonnade.gradients import bucket as bucket_module
from colonnade.gradients.bucket import MISSING, SPARSE, TAIL, Bucket, Buffer, GradientShard
from colonnade.gradients.sums import Sharding, Sum
from colonnade.parallel.flat import ALIGN_BYTES

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


def test_a_new_bucket_has_not_begun_and_waits_for_every_gradient_once():
    bucket = made(5, 100)
    assert (bucket.started, bucket.full, bucket.recording) == (False, False, False)
    assert (bucket.firings, bucket.left, bucket.last) == (1, 1, 0)
    assert (bucket.absent, list(bucket.expected)) == (frozenset(), [0, 1])
    bucket.firings = 3
    bucket.full = True
    bucket.begin()
    assert (bucket.full, bucket.left) == (False, 3)


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


def test_only_whole_buckets_of_plain_tensors_on_the_host_offer_their_views(monkeypatch):
    assert made(5, 6)._offers
    assert not made(5, 6, sharding=STAGED)._offers
    some = made(5, 6)
    monkeypatch.setattr(bucket_module, "is_dtensor", lambda parameter: parameter is some.parameters[1])
    some.use(some.buffer)
    assert not some._offers
    some.begin()
    assert [parameter.grad for parameter in some.parameters] == [None, None]
    monkeypatch.undo()
    with torch.device("meta"):
        away = made(5, 6)
    assert not away._offers


def test_while_recording_nothing_is_offered_and_else_all_that_is_missing():
    bucket = made(5, 6, 7)
    bucket.recording = True
    bucket.begin()
    assert [parameter.grad for parameter in bucket.parameters] == [None] * 3
    bucket.recording = False
    bucket.attach(0)  # as it is after a step, and the others were set to None
    bucket.begin()
    assert all(parameter.grad is grad for parameter, grad in zip(bucket.parameters, bucket.grads, strict=True))
    assert inside(bucket) == [1, 0, 0]
    come(bucket, None, None, None)
    bucket.begin()
    assert inside(bucket) == [0, 0, 0]
    one = made(5)
    one.begin()
    assert one.parameters[0].grad is one.grads[0]


def test_a_sum_is_divided_by_its_divisor_and_multiplied_by_the_factor_of_the_step():
    bucket = made(5, 6, divisor=4.0)
    come(bucket, 4, 6)
    bucket.collect(early=False)
    bucket.send()
    for factor in (1.0, torch.tensor(0.5)):
        bucket.finish(factor)
    assert bucket.transport.calls == ["start", 0.25, 0.125]


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


def test_what_is_attached_and_was_not_offered_has_come():
    bucket = made(5, 6)
    for index in range(2):
        bucket.attach(index)
    assert bucket.collect(early=False) == {}
    assert bucket.started


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
