"""Notes and what follows from them, in one process: which parameters are missing, late, sparse or outside."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade.comm.groups import RankGroup
from colonnade.errors import GradientError
from colonnade.gradients.bucket import MISSING, OUTSIDE, SPARSE
from colonnade.gradients.sums import Sharding, Sum, SyncOptions
from colonnade.gradients.synchroniser import Synchroniser
from colonnade.gradients.uneven import GroupNotes, finish_uneven


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
