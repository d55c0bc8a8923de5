"""Buckets that lie one after another in one gradient buffer become one; all others stay as they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from colonnade.errors import GradientError
from colonnade.optim import flat_step
from colonnade.optim.flat_step import BucketState, FlatBucket, ScatteredGradient, join_neighbours
from colonnade.parallel.flat import FlatLayout

SIZES = [(3, 5), (7,), (2, 2), (40,)]


def buckets_in(dtypes: list[torch.dtype], gap: int = 0) -> list[FlatBucket]:
    """One bucket per size, in one buffer per dtype; `gap` elements lie before the last one."""
    buffers = {dtype: torch.arange(400.0).to(dtype) for dtype in dtypes}
    starts = dict.fromkeys(dtypes, 0)
    found = []
    for at, (shape, dtype) in enumerate(zip(SIZES, dtypes, strict=True)):
        members: list[Tensor] = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for _ in range(2)]
        layout = FlatLayout(members)
        start = starts[dtype] + (gap if at == len(SIZES) - 1 else 0)
        found.append(FlatBucket(layout, members, buffers[dtype][start : start + layout.numel], [at, at]))
        starts[dtype] = start + layout.numel
    return found


@pytest.mark.parametrize("first", [0, 1])
def test_neighbours_become_one_with_every_view_where_it_was(first: int) -> None:
    buckets = buckets_in([torch.float32] * 4)[first:]
    (joined,) = join_neighbours(buckets)
    assert [id(member) for member in joined.members] == [id(m) for bucket in buckets for m in bucket.members]
    before = [view for bucket in buckets for view in bucket.layout.views(bucket.grad)]
    views = joined.layout.views(joined.grad)
    assert [view.data_ptr() for view in views] == [view.data_ptr() for view in before]
    assert [view.shape for view in views] == [view.shape for view in before]
    assert joined.slots == [0, 0, 1, 1, 2, 2, 3, 3][2 * first :]
    assert joined.grad.numel() == sum(bucket.grad.numel() for bucket in buckets)


@pytest.mark.parametrize(
    ("buckets", "lengths"),
    [
        (buckets_in([torch.float32] * 4, gap=16), [6, 2]),
        (buckets_in([torch.float32, torch.float32, torch.float64, torch.float64]), [4, 4]),
        (buckets_in([torch.float32, torch.float64] * 2), [2, 2, 2, 2]),
    ],
    ids=["a gap", "two buffers", "in turn"],
)
def test_others_stay_apart(buckets: list[FlatBucket], lengths: list[int]) -> None:
    assert [len(bucket.members) for bucket in join_neighbours(buckets)] == lengths


def test_where_one_buffer_ends_another_one_does_not_go_on() -> None:
    """The offsets would fit, but the memory is another one."""
    first, second, *_ = buckets_in([torch.float32] * 4)
    other = torch.zeros(400)[second.grad.storage_offset() :][: second.grad.numel()]
    assert len(join_neighbours([first, FlatBucket(second.layout, second.members, other, second.slots)])) == 2


def test_parameters_of_two_dtypes_stay_apart_beside_gradients_of_one() -> None:
    first, second, *_ = buckets_in([torch.float32] * 4)
    halves = [torch.nn.Parameter(member.detach().bfloat16()) for member in second.members]
    layout = FlatLayout(halves)
    grad = first.grad.as_strided((layout.numel,), (1,), second.grad.storage_offset())
    assert len(join_neighbours([first, FlatBucket(layout, halves, grad, second.slots)])) == 2


def test_parameters_that_have_a_flat_buffer_already_keep_it() -> None:
    buckets = buckets_in([torch.float32] * 4)
    buckets[1].params = torch.zeros(buckets[1].layout.numel)
    BucketState(buckets[1], 0).reclaim()  # nothing to bring back
    assert [len(bucket.members) for bucket in join_neighbours(buckets)] == [2, 2, 4]


@pytest.mark.parametrize(("limit", "lengths"), [(95, [64, 32, 96]), (96, [96, 96]), (100, [96, 96]), (192, [192])])
def test_what_is_joined_has_a_limit(limit: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert flat_step.JOINED >= 1 << 20
    monkeypatch.setattr(flat_step, "JOINED", limit)
    joined = join_neighbours(buckets_in([torch.float32] * 4))
    assert [bucket.grad.numel() for bucket in joined] == lengths


def test_a_bucket_without_a_neighbour_stays_the_object_it_is() -> None:
    buckets = buckets_in([torch.float32, torch.float64] * 2)
    assert all(one is other for one, other in zip(join_neighbours(buckets), buckets, strict=True))


def test_gradients_that_are_scattered_have_no_neighbours() -> None:
    first, second, *_ = buckets_in([torch.float32] * 4)
    for one, other in ((True, False), (False, True), (True, True)):
        pair = [
            FlatBucket(b.layout, b.members, ScatteredGradient(b.layout) if is_scattered else b.grad, b.slots)
            for b, is_scattered in ((first, one), (second, other))
        ]
        assert len(join_neighbours(pair)) == 2


def test_addresses_are_written_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[list[int]] = []
    assert flat_step.pinned(SimpleNamespace(pin_memory=lambda: "pinned")) == "pinned"  # type: ignore[arg-type]
    monkeypatch.setattr(flat_step, "pinned", lambda numbers: (written.append(numbers.tolist()), numbers)[1])
    bucket, *_ = buckets_in([torch.float32] * 4)
    gradient = ScatteredGradient(bucket.layout)
    for addresses in ([64, 128], [64, 128], [64, 0]):
        gradient.point_to(addresses)
        assert gradient.addresses.tolist() == addresses
    assert written == [[64, 128], [64, 0]]
    assert gradient.limits.tolist() == [span.stop for span in bucket.layout.spans]
    assert gradient.numel() == bucket.layout.numel


@pytest.mark.parametrize(("numel", "members"), [(0, 1), (1, 2), (-1, 2)])
def test_a_layout_that_does_not_fit_is_refused(numel: int, members: int) -> None:
    bucket, *_ = buckets_in([torch.float32] * 4)
    grad = torch.zeros(bucket.layout.numel + numel)
    with pytest.raises(GradientError, match=f"fit {members} parameters and a gradient buffer of {len(grad)} elements"):
        FlatBucket(bucket.layout, bucket.members[:members], grad, bucket.slots)


def test_parameters_that_were_given_other_memory_come_back_with_their_values() -> None:
    bucket, *_ = buckets_in([torch.float32] * 4)
    state = BucketState(bucket, 0)
    first, second = bucket.members
    second.data = torch.full_like(second, 7.0)
    state.reclaim()
    home = bucket.layout.views(state.params)[1]
    assert second.data_ptr() == home.data_ptr()
    assert bool((home == 7).all())
    first.data = torch.zeros_like(first, dtype=torch.float64)
    with pytest.raises(GradientError, match=r"torch.float32 on cpu, was changed .* torch.float64"):
        state.reclaim()
    first.data = torch.zeros(2)
    with pytest.raises(GradientError, match=r"a parameter of shape \(3, 5\), .* was changed to shape \(2,\)"):
        state.reclaim()
