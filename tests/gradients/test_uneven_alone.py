"""Notes and what follows from them, in one process: which parameters are missing, late, sparse or outside."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade.comm.rank_group import RankGroup
from colonnade.errors import GradientError
from colonnade.gradients import uneven as uneven_module
from colonnade.gradients.bucket import MISSING, OUTSIDE, SPARSE
from colonnade.gradients.sums import Sharding, Sum, SyncOptions
from colonnade.gradients.synchroniser import Synchroniser
from colonnade.gradients.uneven import GroupNotes, finish_uneven


class Kept:
    """A bucket of which it is only looked at what it is told."""

    def __init__(self, is_sharded: bool = False) -> None:
        self.is_sharded, self.attached, self.absent = is_sharded, [], frozenset({99})

    def attach(self, index: int) -> None:
        self.attached.append(index)


def state(count: int, bucket: Kept, sharding: Sharding | None = None, homeless: int = -1) -> Any:
    parameters = tuple(nn.Parameter(torch.zeros(2)) for _ in range(count))
    sum_ = Sum(tuple(f"p{at}" for at in range(count)), parameters, (4, 6), None, 2.0, sharding=sharding)
    places = {at: (bucket, at + 10) for at in range(count) if at != homeless}
    return SimpleNamespace(sum=sum_, group=SimpleNamespace(ranks=(4, 6)), places=places, buckets=[bucket])


def test_what_is_missing_on_some_ranks_is_whole_and_what_is_missing_on_all_is_absent():
    bucket = Kept()
    reports = [bytes([0, MISSING, MISSING, 0, MISSING]), bytes([0, 0, MISSING, MISSING, MISSING])]
    uneven = finish_uneven(state(5, bucket, homeless=4), reports, 1.0)
    assert uneven == {1: [4], 3: [6]}
    assert bucket.attached == [11, 13]
    assert bucket.absent == {12}


def test_nothing_remarkable_leaves_every_gradient_where_it_is():
    bucket = Kept()
    assert finish_uneven(state(2, bucket), [bytes(2), bytes(2)], 1.0) == {}
    assert bucket.attached == []
    assert bucket.absent == frozenset()


def test_a_sharded_bucket_attaches_nothing_and_refuses_sparse_gradients():
    bucket = Kept(is_sharded=True)
    assert finish_uneven(state(1, bucket, Sharding()), [bytes([MISSING]), bytes([0])], 1.0) == {0: [4]}
    assert bucket.attached == []
    with pytest.raises(GradientError, match="'p0' is sparse, and ZeRO"):
        finish_uneven(state(1, bucket, Sharding()), [bytes([SPARSE]), bytes([0])], 1.0)


def alone(parameters: list[nn.Parameter], divisor: float = 1.0) -> Synchroniser:
    names = tuple(f"p{at}" for at in range(len(parameters)))
    return Synchroniser([Sum(names, tuple(parameters), (0,), None, divisor)])


def test_one_process_divides_sparse_gradients_and_adds_what_is_given_late():
    table, weight, unused = nn.Embedding(6, 2, sparse=True), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    reducer = alone([table.weight, weight, unused], divisor=4.0)
    for _ in range(2):
        table.weight.grad = weight.grad = unused.grad = None
        reducer.prepare(last=True)
        (table(torch.tensor([1, 1, 3])) * weight).sum().backward()
        reducer.wait()
        dense = table.weight.grad.to_dense() if table.weight.grad.is_sparse else table.weight.grad
        expected = torch.zeros(6, 2)
        expected[1], expected[3] = 2 / 4, 1 / 4
        torch.testing.assert_close(dense, expected)
        torch.testing.assert_close(weight.grad, table.weight[torch.tensor([1, 1, 3])].sum(0).detach() / 4)
        assert unused.grad is None


@pytest.mark.parametrize(
    ("notes", "placed", "dense", "sparse", "attached", "absent", "uneven"),
    [
        ((0, OUTSIDE), True, [0], [], [], [], {}),
        ((OUTSIDE, MISSING), True, [0], [], [], [], {0: [6]}),
        ((MISSING, OUTSIDE), False, [0], [], [], [], {0: [4]}),
        ((SPARSE, 0), True, [0], [], [], [], {}),
        ((SPARSE, SPARSE), True, [], [0], [], [], {}),
        ((SPARSE, MISSING), True, [], [0], [], [], {0: [6]}),
        ((SPARSE, MISSING), False, [], [0], [], [], {0: [6]}),
        ((SPARSE, OUTSIDE), False, [0], [], [], [], {}),
        ((MISSING, 0), True, [], [], [10], [], {0: [4]}),
        ((MISSING, MISSING), True, [], [], [], [10], {}),
        ((MISSING, MISSING), False, [], [], [], [], {}),
    ],
)
def test_what_becomes_of_a_gradient_that_went_another_way(
    monkeypatch, notes, placed, dense, sparse, attached, absent, uneven
):
    found: dict[str, list[int]] = {"dense": [], "sparse": []}
    monkeypatch.setattr(uneven_module, "_sum_dense", lambda sum_, positions, *_: found["dense"].extend(positions))
    monkeypatch.setattr(uneven_module, "_sum_sparse", lambda sum_, position, *_: found["sparse"].append(position))
    bucket = Kept()
    one = state(1, bucket, homeless=-1 if placed else 0)
    assert finish_uneven(one, [bytes([note]) for note in notes], 1.0) == uneven
    assert (found, bucket.attached, bucket.absent) == ({"dense": dense, "sparse": sparse}, attached, frozenset(absent))


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


class Heard:
    """A group of two of which the other one says what it is told to."""

    ranks, size = (4, 6), 2

    def __init__(self, other: bytes | None, notes: bytes = b"") -> None:
        self.other, self.notes, self.gathered = other, notes, 0

    def signal(self, message: bytes) -> None:
        self.mine = message

    def collect(self) -> list[bytes]:
        return [self.mine, self.mine if self.other is None else self.other]

    def gather_bytes(self, own: bytes) -> list[bytes]:
        self.gathered += 1
        return [own, self.notes]


def agreed(group: Any) -> list[list[bytes]]:
    states = [SimpleNamespace(close_notes=lambda: b"ab"), SimpleNamespace(close_notes=lambda: b"c")]
    agreement = GroupNotes(group, states)
    agreement.announce(3)
    assert agreement.resolve() is agreement.resolve()
    return agreement.resolve()


def test_notes_travel_only_where_they_differ():
    same = Heard(None)
    assert agreed(same) == [[b"ab", b"ab"], [b"c", b"c"]]
    assert same.gathered == 0
    other = Heard((3).to_bytes(8, "little") + b"another!", b"xyz")
    assert agreed(other) == [[b"ab", b"xy"], [b"c", b"z"]]
    assert other.gathered == 1


def test_ranks_at_different_steps_are_named():
    with pytest.raises(GradientError, match="rank 4: 3, rank 6: 2"):
        agreed(Heard((2).to_bytes(8, "little") + b"another!"))


def test_a_gradient_outside_its_bucket_is_added_to_it():
    weight = nn.Parameter(torch.ones(3))
    reducer = alone([weight], divisor=2.0)
    bucket = reducer.buckets[0]
    one = SimpleNamespace(sum=bucket.sum, group=RankGroup((0,), None), places={0: (bucket, 0)}, buckets=[bucket])
    bucket.views[0].fill_(1.0)
    weight.grad = torch.full((3,), 6.0)
    assert finish_uneven(one, [bytes([OUTSIDE])], 0.5) == {}
    torch.testing.assert_close(weight.grad, torch.full((3,), 4.0))  # what was there, and half of what came late
    assert weight.grad is bucket.grads[0]
