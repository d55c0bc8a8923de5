"""Elements in any memory order; DTensors, and optimizers that keep the state of only some parameters: saved and loaded like everything else."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from colonnade.checkpoint import CheckpointManager
from colonnade.checkpoint.format.boxes import Box, tiles
from colonnade.checkpoint.plan.tensors import boxes_in_memory
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.testing import run_world
from tests.checkpoint.models import WAYS, Way, launched

ROWS = torch.arange(20.0).reshape(5, 4)


def _stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * 0.5
    optimizer.step()
    return optimizer


def _distributed(context: ParallelContext, value: torch.Tensor) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = context.device_mesh(ParallelMode.DATA, ParallelMode.TENSOR)
    model = nn.Module()
    model.rows = nn.Parameter(distribute_tensor(value.clone(), mesh, [Shard(0), Shard(1)]))
    model.columns = nn.Parameter(distribute_tensor(value.clone(), mesh, [Replicate(), Shard(0)]))
    return model


def dtensors(folder: Path, load_only: bool) -> list[Any]:
    with launched(Way(4, {"tensor": 2})) as context, CheckpointManager(folder, context) as manager:
        model = _distributed(context, ROWS)
        optimizer = _stepped(model)
        truth = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
        moment = optimizer.state[model.rows]["exp_avg_sq"].full_tensor()
        if not load_only:
            manager.save(1, model, optimizer)
        fresh = _distributed(context, torch.zeros(5, 4))
        other = torch.optim.AdamW(fresh.parameters(), lr=0.1)
        manager.load(fresh, other)
        back = {name: parameter.full_tensor() for name, parameter in fresh.named_parameters()}
        state = other.state[fresh.rows]
        same = [torch.equal(truth[name], back[name]) for name in truth]
        return [*same, torch.equal(moment, state["exp_avg_sq"].full_tensor()), state["step"].item()]


def plain_model(value: torch.Tensor) -> nn.Module:
    model = nn.Module()
    model.rows, model.columns = nn.Parameter(value.clone()), nn.Parameter(value.clone())
    return model


@pytest.mark.slow
def test_dtensors_go_through_one_process_and_back(tmp_path):
    for seen in run_world(4, dtensors, tmp_path, False).values:
        assert seen == [True, True, True, 1.0]
    truth = plain_model(ROWS)
    optimizer = _stepped(truth)
    model = plain_model(torch.zeros(5, 4))
    other = torch.optim.AdamW(model.parameters(), lr=0.1)
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        manager.load(model, other)
        manager.save(2, model, other)
    assert torch.equal(model.rows, truth.rows)
    assert torch.equal(model.columns, truth.columns)
    for slot in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(other.state[model.rows][slot], optimizer.state[truth.rows][slot])
    for seen in run_world(4, dtensors, tmp_path, True).values:
        assert seen == [True, True, True, 1.0]


def partitioned(folder: Path, save: bool) -> list[Any]:
    """Each rank's optimizer has some of the parameters, as where ranks share the optimizer's work."""
    with launched(WAYS["data 2"]) as context, CheckpointManager(folder, context) as manager:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
        for at, layer in enumerate(model):
            nn.init.constant_(layer.weight, at)
        mine = nn.ModuleList(list(model)[1 - context.get_global_rank() :: 2])
        optimizer = torch.optim.AdamW(mine.parameters(), lr=0.1)
        if save:
            optimizer = _stepped(mine)
            manager.save(1, model, optimizer)
            return []
        manager.load(model, optimizer)
        return [optimizer.state[layer.weight]["exp_avg"].unique().tolist() for layer in mine]


def test_state_is_saved_by_the_rank_that_has_it(tmp_path):
    run_world(2, partitioned, tmp_path, True)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.7)
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        manager.load(model, optimizer)
    assert all("exp_avg" in optimizer.state[parameter] for parameter in model.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.1
    average = optimizer.state[model[0].weight]["exp_avg"].unique().tolist()
    for seen in run_world(2, partitioned, tmp_path, False).values:
        assert seen == [average, average]


@given(st.permutations(range(3)), st.integers(0, 24), st.integers(0, 24))
def test_ranges_of_any_memory_order_tile_the_whole(order, first, second):
    local = torch.arange(24).view(2, 3, 4).permute(order)
    flat = torch.arange(24)
    tensor: Any = SimpleNamespace(local=local, box=Box((0, 5, 0), tuple(local.shape)))
    cuts = sorted({0, first, second, 24})
    found = [part for start, stop in pairwise(cuts) for part in boxes_in_memory(tensor, start, stop, flat[start:stop])]
    moved = [Box((box.offset[0], box.offset[1] - 5, box.offset[2]), box.shape) for box, _ in found]
    assert tiles(moved, tuple(local.shape))
    for box, (_, values) in zip(moved, found, strict=True):
        assert torch.equal(local[box.slices_in(Box((0, 0, 0), tuple(local.shape)))], values)
