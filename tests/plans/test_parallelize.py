"""A model of one's own under a plan, beside one process."""

from __future__ import annotations

import copy

import torch

from colonnade import parallelize
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.testing import run_world
from tests.plans.models import PLAN, build, tokens
from tests.plans.training import CLIP, check


def _equals_one_process() -> None:
    config = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}, "clip_grad_norm": CLIP, "gradient_accumulation": 3}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        engine = check(PLAN, gpc)
        assert engine.model.blocks[0].mlp.up.weight.shape == (16, 16)
        copied = copy.deepcopy(engine.model)
        with torch.no_grad():
            copied.blocks[0].mlp.down.weight.zero_()
            assert not torch.equal(copied(tokens(2)), engine.model(tokens(2)))
        engine.close()


def test_a_plan_of_the_users_equals_one_process():
    run_world(2, _equals_one_process)


def test_without_tensor_parallelism_nothing_is_cut():
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        model = build()
        before = copy.deepcopy(model)
        assert parallelize(model, PLAN, context=gpc) is model
        assert torch.equal(model(tokens(2)), before(tokens(2)))
        assert parallelize(model, context=gpc) is model
