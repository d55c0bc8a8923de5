"""Elements in any memory order; DTensors, and optimizers that keep the state of only some parameters: saved and loaded like everything else."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from colonnade.checkpoint import CheckpointManager
from colonnade.checkpoint.manifest import FileRecord
from colonnade.checkpoint.save import SavePlan, _plan_shard, merge_tensors
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.parallel.boxes import full_box, tiles
from colonnade.parallel.flat import FlatShard, section_runs
from colonnade.parallel.placement import Placement
from colonnade.parallel.whole import LocalTensor, _in_sections, boxes_in_memory
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


@st.composite
def packed(draw: Any) -> tuple[torch.Tensor, int, list[int], int]:
    """A whole of consecutive numbers, the dimension that is packed, its sections, and how many ranks cut them."""
    ranks = draw(st.integers(1, 3))
    sections = [ranks * length for length in draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))]
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = sum(sections)
    return torch.arange(math.prod(shape)).view(shape), dim, sections, ranks


def local_tensors(whole: torch.Tensor, dim: int, sections: list[int], ranks: int, order: list[int]) -> list[Any]:
    """What each rank has of a packed tensor, its elements in any order in memory."""
    found = []
    for at in range(ranks):
        runs = section_runs(sections, at, ranks)
        part = torch.cat([whole.narrow(dim, *run) for run in runs], dim)
        local = part.permute(order).contiguous().permute([order.index(each) for each in range(part.dim())])
        here = full_box(part.shape)
        fields = dict(
            label="w",
            names=("w",),
            tensor=local,
            placement=Placement(),
            holders=(at,),
            sharers=(0,),
            parts={},
            by_hand={},
        )
        found.append(
            LocalTensor(**fields, shape=tuple(whole.shape), places=tuple(_in_sections((here, here), dim, runs)))
        )
    return found


@given(packed(), st.data())
def test_sections_cut_and_joined_are_the_whole(case, data):
    """By pieces, by ranges of elements in any memory order, and by what is written of such ranges."""
    whole, dim, sections, ranks = case
    order = data.draw(st.permutations(range(whole.dim())))
    by_pieces, by_ranges = torch.full_like(whole, -1), torch.full_like(whole, -1)
    plans = [SavePlan(rank) for rank in range(ranks)]
    for at, tensor in enumerate(local_tensors(whole, dim, sections, ranks, order)):
        assert tiles([here for _, here in tensor.places], tuple(tensor.local.shape))
        for box, view in tensor.pieces(tensor.local):
            by_pieces[box.slices_in(full_box(whole.shape))] = view
        flat = torch.as_strided(tensor.local, (tensor.local.numel(),), (1,))
        cuts = sorted({0, flat.numel(), *data.draw(st.lists(st.integers(0, flat.numel()), max_size=2))})
        for start, stop in pairwise(cuts):
            for box, view in boxes_in_memory(tensor, start, stop, flat[start:stop]):
                by_ranges[box.slices_in(full_box(whole.shape))] = view
            _plan_shard(plans[at], tensor, FlatShard(start, stop, (0,), {}), "moment", flat[start:stop])
    assert torch.equal(by_pieces, whole)
    assert torch.equal(by_ranges, whole)
    (record,), _ = merge_tensors([plan.note(FileRecord("", 0, "")) for plan in plans])  # refuses what does not tile
    assert record.shape == tuple(whole.shape)
    assert all(entry.read().shape == entry.shape for plan in plans for entry in plan.entries)
    written = torch.cat([entry.read() for plan in plans for entry in plan.entries])
    assert torch.equal(written.sort().values, whole.flatten())
