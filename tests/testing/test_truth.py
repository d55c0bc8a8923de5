"""Whole tensors from the parts that ranks hold, and the comparison with the truth."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import colonnade
from colonnade import ParallelContext, ParallelMode, Replicate, Shard, place
from colonnade.errors import ParityError
from colonnade.testing import compare, gather_gradients, gather_weights, run_world

WHOLE = torch.arange(24.0).reshape(4, 6)


def gathered(apart: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    config = {"parallel": {"tensor": 2}}
    with colonnade.launch(config, context=ParallelContext(), verbose=False) as gpc:
        rank = gpc.get_local_rank(ParallelMode.TENSOR)
        model = nn.Module()
        # A view, and not in order: what it is a view of must not travel, nor its strides count.
        model.columns = nn.Parameter(WHOLE.t()[3 * rank : 3 * rank + 3].t())
        model.same = nn.Parameter(torch.ones(2) + (rank if apart else 0))
        place(model.columns, {ParallelMode.TENSOR: Shard(1)})
        place(model.same, {ParallelMode.TENSOR: Replicate()})
        model.columns.grad = 2 * model.columns.detach()
        return gather_weights(model, gpc), gather_gradients(model, gpc)


def test_parts_are_joined_on_every_rank() -> None:
    for weights, gradients in run_world(4, gathered, False).values:
        compare({"columns": WHOLE.double(), "same": torch.ones(2).double()}, weights, rtol=0.0)
        compare({"columns": 2 * WHOLE.double(), "same": torch.zeros(2).double()}, gradients, rtol=0.0)


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.arange(3), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, False]), requires_grad=False)


def _kinds() -> dict[str, Tensor]:
    with colonnade.launch({}, context=ParallelContext(), verbose=False) as gpc:
        return gather_weights(Kinds(), gpc)


def test_whole_numbers_and_flags_are_compared_too() -> None:
    truth = dict(Kinds().named_parameters())
    for weights in run_world(2, _kinds).values:
        compare(truth, weights, rtol=0.0)
        for name, other in (("count", weights["count"] + 1), ("flags", 1 - weights["flags"])):
            assert not compare(truth, {**weights, name: other}, rtol=1e-3, check=False).ok


def test_holders_of_one_part_must_agree_to_the_bit() -> None:
    with pytest.raises(RuntimeError, match="ranks 0 and 1 store the same shard of same, but with different values"):
        run_world(2, gathered, True)


def test_what_differs_is_missing_or_of_another_shape_is_in_the_table() -> None:
    truth = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "d": torch.ones(2)}
    found = {"a": torch.ones(2), "b": torch.tensor([1.0, 1.5]), "c": torch.ones(3)}
    with pytest.raises(ParityError, match=r"(?s)DIFFERS shape \(3,\) instead of \(2,\).*DIFFERS missing.*\na .* ok"):
        compare(truth, found, rtol=1e-6)
    table = compare(truth, found, rtol=1e-6, check=False)
    assert [entry.name for entry in table.differences if not entry.ok] == ["b", "c", "d"]
    assert table.differences[1].largest == 0.5
