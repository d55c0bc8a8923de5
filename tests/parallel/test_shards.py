"""The part that a rank has of a placed tensor; and who has the interface of a sharded optimizer."""

from __future__ import annotations

import torch
from torch import nn

from colonnade.context.build import build_layout
from colonnade.context.parallel_mode import ParallelMode as M
from colonnade.optim.zero import ZeroOptimizer
from colonnade.parallel.placement import Placement, Shard
from colonnade.parallel.shards import ShardedOptimizer, part_indices


def test_the_first_mode_cuts_first_and_dimensions_are_apart():
    layout = build_layout({"parallel": {"tensor": 2}}, 6)  # rank = 2 * data + tensor
    for rank in range(6):
        data, tensor = divmod(rank, 2)
        both = Placement({M.TENSOR: Shard(0), M.DATA: Shard(0)})
        assert part_indices(layout, both, rank) == {0: (3 * tensor + data, 6)}
        other = Placement({M.DATA: Shard(0), M.TENSOR: Shard(0)})
        assert part_indices(layout, other, rank) == {0: (rank, 6)}
        apart = Placement({M.DATA: Shard(1), M.TENSOR: Shard(0)})
        assert part_indices(layout, apart, rank) == {1: (data, 3), 0: (tensor, 2)}
        assert part_indices(layout, Placement(), rank) == {}


def test_a_plain_optimizer_is_not_a_sharded_one():
    assert not isinstance(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0), ShardedOptimizer)
    assert all(hasattr(ZeroOptimizer, name) for name in ("flat_shard", "load_state_dict"))
