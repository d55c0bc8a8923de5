"""Whom a mixture of experts talks to, on every rank of worlds that are not there: groups, placements, and the order of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode as M
from colonnade.nn.moe.dispatch import Scope, Traffic
from colonnade.nn.moe.router import loss_of
from colonnade.parallel.wire import recorded
from colonnade.proof.planner.ranks import fake_rank

TENSOR = {"size": 2, "mode": "1d"}
ACROSS = {"tensor": TENSOR, "expert": {"size": 2, "over": "data*tensor"}}
"""An expert group that reaches across the ranks of a tensor group."""


def ranks_of(world: int, parallel: dict[str, Any]) -> Iterator[ParallelContext]:
    """The context of each rank, one after another."""
    for rank in range(world):
        context = ParallelContext()
        with fake_rank(load_config({"parallel": parallel}), world, rank, context):
            yield context


@pytest.mark.parametrize(
    ("world", "parallel", "expected"),
    [
        (2, {}, [(1, 0, 1, False, (M.DATA,))] * 2),
        (2, {"expert": 2}, [(2, 0, 1, False, (M.DATA,)), (2, 1, 1, False, (M.DATA,))]),
        (2, {"tensor": TENSOR}, [(1, 0, 2, False, ())] * 2),
        (2, ACROSS, [(2, 0, 2, True, ()), (2, 1, 2, True, ())]),
        (2, {"sequence": 2}, [(1, 0, 1, False, (M.SEQUENCE,))] * 2),
        (2, {"tensor": {"size": 2, "mode": "sequence"}}, [(1, 0, 1, False, (M.TENSOR,))] * 2),
        (4, {"tensor": TENSOR, "expert": 2}, [(2, place, 2, False, (M.DATA,)) for place in (0, 0, 1, 1)]),
        (4, {"data": 2, "sequence": 2}, [(1, 0, 1, False, (M.DATA, M.SEQUENCE))] * 4),
        (2, {"pipeline": 2}, [(1, 0, 1, False, ())] * 2),
    ],
    ids=str,
)
def test_who_holds_experts_and_who_has_tokens_of_its_own(world, parallel, expected):
    found = []
    for context in ranks_of(world, parallel):
        scope = Scope.of(context)
        found.append((scope.expert, scope.expert_place, scope.tensor, scope.shares_tokens, scope.distinct))
    assert found == expected
    assert Scope.of(ParallelContext()).distinct == ()


def test_losses_of_each_ranks_own_are_not_sent():
    for context in ranks_of(2, {}):
        for columns, sent in ((1, 0), (2, 1), (6, 1)):
            with recorded() as calls:
                loss_of(torch.ones(3, columns), Scope.of(context))
            assert len(calls) == sent


def test_where_nobody_knows_the_sizes_rows_go_to_all_ranks_alike():
    for context in ranks_of(3, {"expert": 3}):
        traffic = Traffic(torch.ones(6, dtype=torch.int64), 3, context)
        assert traffic.sizes(7) == ([3, 2, 2],) * 2
        assert traffic.sizes(6) == ([2, 2, 2],) * 2
