"""Packed weights, of which each rank has its part of every section: through checkpoints of other layouts, and from meta_init."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade import initialize, meta_init, parallelize
from colonnade._launch import launch
from colonnade.checkpoint import CheckpointManager
from colonnade.context.parallel_context import ParallelContext
from colonnade.testing import gather_weights, run_world
from tests.hf.plans.models import CASES, PACKED, build, labels, packed_model, summed_loss, tokens
from tests.hf.plans.training import optimizer

LEGS: list[tuple[int, dict[str, Any]]] = [
    (4, {"parallel": {"tensor": {"size": 2, "mode": "1d"}}, "zero": {"stage": 1}}),
    (4, {"parallel": {"tensor": {"size": 4, "mode": "1d"}}}),
    (4, {"parallel": {"tensor": {"size": 2, "mode": "1d"}}, "zero": {"stage": 3}}),
    (2, {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}),
]


def leg(config: dict[str, Any], folder: Path, step: int) -> dict[str, Tensor]:
    """Load what is there, or train on the first leg; save; the whole weights."""
    with launch(config, context=ParallelContext(), verbose=False) as gpc, CheckpointManager(folder, gpc) as manager:
        model = parallelize(build(packed_model, seed=step), PACKED, context=gpc)
        engine = initialize(model, optimizer, summed_loss, context=gpc)[0]
        if step == 1:
            engine.backward(summed_loss(engine(tokens(4)), labels(4)))
            engine.step()
        else:
            manager.load(engine.model, engine.optimizer)
        manager.save(step, engine.model, engine.optimizer)
        whole = gather_weights(engine.model, gpc)
        engine.close()
        return whole


def in_one_process(folder: Path, step: int) -> tuple[dict[str, Tensor], dict[int, Any]]:
    model = build(packed_model, seed=9)
    plain = optimizer(model.parameters())
    with CheckpointManager(folder, ParallelContext()) as manager:
        manager.load(model, plain, step=step)
    return {name: p.detach().clone() for name, p in model.named_parameters()}, plain.state_dict()["state"]


@pytest.mark.slow
def test_a_checkpoint_of_packed_weights_loads_on_any_layout_bit_for_bit(tmp_path):
    truth: Any = None
    for step, (world, config) in enumerate(LEGS, 1):
        gathered = run_world(world, leg, config, tmp_path, step).values[0]
        weights, state = in_one_process(tmp_path, step)
        truth = truth or (weights, state)
        for name, weight in weights.items():
            assert torch.equal(weight, truth[0][name]), (step, name)
            assert torch.equal(weight, gathered[name]), (step, name)
        for number, kept in truth[1].items():
            assert all(torch.equal(value, state[number][name]) for name, value in kept.items()), (step, number)
    assert truth[1][4]["exp_avg"].abs().sum() > 0


def _from_meta(inside: bool, zero: int) -> dict[str, dict[str, Tensor]]:
    config = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}, "zero": {"stage": zero}, "seed": 3}
    found = {}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        for name in ("plain", "packed", "tied, the embedding left out", "transposed"):
            made, plan = CASES[name]
            with meta_init():
                model = made()
                model = parallelize(model, plan, context=gpc) if inside else model
            model = model if inside else parallelize(model, plan, context=gpc)
            engine = initialize(model, optimizer, context=gpc)[0]
            found[name] = gather_weights(engine.model, gpc)
            engine.close()
    return found


def _whole_from_meta() -> dict[str, dict[str, Tensor]]:
    found = {}
    with launch({"seed": 3}, context=ParallelContext(), verbose=False) as gpc:
        for name in ("plain", "packed", "tied, the embedding left out", "transposed"):
            with meta_init():
                model = CASES[name][0]()
            found[name] = gather_weights(initialize(model, optimizer, context=gpc)[0].model, gpc)
    return found


@pytest.mark.slow
def test_a_model_of_the_meta_device_starts_with_the_same_weights_whether_cut_inside_or_after():
    truth = _whole_from_meta()
    for world, inside, zero in ((2, False, 0), (2, True, 0), (4, False, 3)):
        for name, weights in run_world(world, _from_meta, inside, zero).values[0].items():
            for key, weight in truth[name].items():
                assert torch.equal(weight, weights[key]), (name, key, inside, zero)
