"""What a mixture of experts sends on every rank of worlds that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.nn.moe.dispatch import Scope, Traffic
from colonnade.nn.moe.router import loss_of
from colonnade.parallel.wire import recorded
from colonnade.proof.planner.ranks import fake_rank


def ranks_of(world: int, parallel: dict[str, Any]) -> Iterator[ParallelContext]:
    """The context of each rank, one after another."""
    for rank in range(world):
        context = ParallelContext()
        with fake_rank(load_config({"parallel": parallel}), world, rank, context):
            yield context


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
