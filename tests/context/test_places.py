"""Who a rank is, for every rank of a world that is not there: first, last, neighbours, stages."""

from __future__ import annotations

import copy
import random

import numpy
import pytest
import torch

from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.context.random import derive_seed

M = ParallelMode


def of_rank(rank: int) -> ParallelContext:
    context = ParallelContext()
    context.simulate(load_config({"parallel": {"pipeline": 3, "tensor": {"size": 2, "mode": "1d"}}}), 12, rank)
    return context


@pytest.mark.parametrize("rank", range(12))
def test_places_and_neighbours(rank):
    """data 2 x pipeline 3 x tensor 2"""
    here = of_rank(rank)
    assert copy.deepcopy(here) is here  # a copy of a layer lives in the same world
    data, pipeline, tensor = rank // 6, rank // 2 % 3, rank % 2
    assert (here.data_parallel_size, here.pipeline_parallel_size, here.tensor_parallel_size) == (2, 3, 2)
    assert [here.get_local_rank(mode) for mode in (M.DATA, M.PIPELINE, M.TENSOR)] == [data, pipeline, tensor]
    stages = [data * 6 + at * 2 + tensor for at in range(3)]
    assert here.get_ranks_in_group(M.PIPELINE) == stages
    assert here.get_next_global_rank(M.PIPELINE) == stages[(pipeline + 1) % 3]
    assert here.get_prev_global_rank(M.PIPELINE) == stages[(pipeline + 2) % 3]
    assert here.is_first_rank(M.PIPELINE) is here.is_pipeline_first_stage() is (pipeline == 0)
    assert here.is_last_rank(M.PIPELINE) is here.is_pipeline_last_stage() is (pipeline == 2)
    assert (here.is_first_rank(M.TENSOR), here.is_last_rank(M.TENSOR)) == (tensor == 0, tensor == 1)
    assert here.is_initialized(M.TENSOR)
    assert not here.is_initialized(M.EXPERT)
    seed = derive_seed(0, f"data={data}", f"pipeline={pipeline}")
    assert torch.initial_seed() == seed
    assert numpy.random.rand() == numpy.random.RandomState(seed % 2**32).rand()
    assert random.random() == random.Random(seed).random()
    here.set_seed(4)  # another time
    assert here.seed == 4
    for chunk in range(2):
        here.set_virtual_pipeline_parallel_size(2)
        here.set_virtual_pipeline_parallel_rank(chunk)
        assert here.is_pipeline_first_stage() is (pipeline == 0 and chunk == 0)
        assert here.is_pipeline_last_stage() is (pipeline == 2 and chunk == 1)
        assert here.is_pipeline_first_stage(ignore_virtual=True) is (pipeline == 0)
        assert here.is_pipeline_last_stage(ignore_virtual=True) is (pipeline == 2)
    here.destroy()
