"""A model of one's own under a plan, beside one process."""

from __future__ import annotations

import copy
from typing import Any

import torch

from colonnade import parallelize
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.testing import run_world
from tests.plans.models import CASES, HIDDEN, INNER, PLAN, build, tokens
from tests.plans.training import CLIP, check

TENSOR = {"size": 2, "mode": "1d"}
CONFIG = {"clip_grad_norm": CLIP, "gradient_accumulation": 3}


def _equals_one_process(parallel: dict[str, Any], more: dict[str, Any], names: list[str]) -> None:
    with launch({**CONFIG, "parallel": parallel, **more}, context=ParallelContext(), verbose=False) as gpc:
        for name in names:
            made, plan = CASES[name]
            try:
                check(plan, gpc, made).close()
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error


def test_every_style_equals_one_process():
    """Gradients, norm and weights after three clipped steps, of 3 micro-batches with uneven counts each: fp64, 1e-10."""
    run_world(2, _equals_one_process, {"tensor": TENSOR}, {}, list(CASES), timeout=110)


def _copied() -> None:
    with launch({"parallel": {"tensor": TENSOR}}, context=ParallelContext(), verbose=False) as gpc:
        model = parallelize(build(), PLAN, context=gpc)
        assert model.blocks[0].mlp.up.weight.shape == (INNER // 2, HIDDEN)
        copied = copy.deepcopy(model)
        with torch.no_grad():
            copied.blocks[0].mlp.down.weight.zero_()
            assert not torch.equal(copied(tokens(2)), model(tokens(2)))


def test_a_copy_of_the_model_computes_with_its_own_weights():
    run_world(2, _copied)


def test_without_tensor_parallelism_nothing_is_cut():
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        model = build()
        before = copy.deepcopy(model)
        assert parallelize(model, PLAN, context=gpc) is model
        assert torch.equal(model(tokens(2)), before(tokens(2)))
        assert parallelize(model, context=gpc) is model
