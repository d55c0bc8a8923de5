"""Process groups beyond those of the modes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.testing import run_world


def _ask_twice() -> list[float]:
    """Only ranks 0 and 3 want the pair, and they want it twice; then everybody wants another one."""
    with launch({"parallel": {"tensor": 2}}, context=ParallelContext(), verbose=False) as gpc:
        rank = gpc.get_global_rank()
        for _ in range(2):
            gpc.ensure_groups([(0, 3)] if rank in (0, 3) else [])
        gpc.ensure_groups([(0, 1, 2)])
        sums = []
        for ranks in ((0, 3), (0, 1, 2)):
            if rank in ranks:
                value = torch.tensor([float(rank)])
                dist.all_reduce(value, group=gpc.group_of_ranks(ranks))
                sums.append(value.item())
        return sums


def test_further_groups_are_created_once_whoever_asks():
    assert run_world(4, _ask_twice).values == [[3.0, 3.0], [3.0], [3.0], [3.0]]
