"""Elements in any memory order; DTensors, and optimizers that keep the state of only some parameters: saved and loaded like everything else."""

from __future__ import annotations

import math
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
from colonnade.checkpoint.manifest import FileRecord
from colonnade.checkpoint.save_plan import SavePlan, _plan_shard, merge_tensors
from colonnade.context import build_layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import CheckpointError
from colonnade.parallel.boxes import Box, tiles, whole_box
from colonnade.parallel.flat import FlatShard, section_runs
from colonnade.parallel.placement import Placement, Shard, Tied, place
from colonnade.parallel.whole import (
    LocalTensor,
    _alone,
    _in_sections,
    _uneven_offset,
    _uneven_sizes,
    boxes_in_memory,
    extra_states,
    locate_tensors,
)
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
    whole = Box((0, 0, 0), tuple(local.shape))
    tensor: Any = SimpleNamespace(local=local, places=((Box((0, 5, 0), whole.shape), whole),))
    cuts = sorted({0, first, second, 24})
    found = [part for start, stop in pairwise(cuts) for part in boxes_in_memory(tensor, start, stop, flat[start:stop])]
    moved = [Box((box.offset[0], box.offset[1] - 5, box.offset[2]), box.shape) for box, _ in found]
    assert tiles(moved, tuple(local.shape))
    for box, (_, values) in zip(moved, found, strict=True):
        assert torch.equal(local[box.slices_in(whole)], values)


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
        here = whole_box(part.shape)
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
            by_pieces[box.slices_in(whole_box(whole.shape))] = view
        flat = torch.as_strided(tensor.local, (tensor.local.numel(),), (1,))
        cuts = sorted({0, flat.numel(), *data.draw(st.lists(st.integers(0, flat.numel()), max_size=2))})
        for start, stop in pairwise(cuts):
            for box, view in boxes_in_memory(tensor, start, stop, flat[start:stop]):
                by_ranges[box.slices_in(whole_box(whole.shape))] = view
            _plan_shard(plans[at], tensor, FlatShard(start, stop, (0,), {}), "moment", flat[start:stop])
    assert torch.equal(by_pieces, whole)
    assert torch.equal(by_ranges, whole)
    (record,), _ = merge_tensors([plan.note(FileRecord("", 0, "")) for plan in plans])  # refuses what does not tile
    assert record.shape == tuple(whole.shape)
    assert all(entry.read().shape == entry.shape for plan in plans for entry in plan.entries)
    written = torch.cat([entry.read() for plan in plans for entry in plan.entries])
    assert torch.equal(written.sort().values, whole.flatten())


@pytest.mark.parametrize(
    ("start", "length", "places"),
    [
        (0, 6, [(0, 5, 3), (10, 8, 3)]),
        (3, 2, [(10, 5, 2)]),
        (2, 3, [(2, 5, 1), (10, 6, 2)]),
        (0, 3, [(0, 5, 3)]),
        (6, 0, [(6, 5, 0)]),
    ],
)
def test_what_is_cut_out_of_a_packed_part_lies_in_its_sections(start, length, places):
    """A rank has [0, 3) and [10, 13) of the whole, one after the other, and of that the elements from `start` on."""
    place = (Box((4, start), (1, length)), Box((0, 5), (1, length)))
    assert _in_sections(place, 1, [(0, 3), (10, 3)]) == [
        (Box((4, there), (1, size)), Box((0, here), (1, size))) for there, here, size in places
    ]


def uneven(label: str, index: int, count: int) -> Any:
    """Rank's part `index` of `count` along dimension 0, as it is known before the others have told theirs."""
    return SimpleNamespace(label=label, names=(label,), placement="placed", by_hand={0: (index, count)})


def test_what_a_rank_of_a_layout_sees_of_a_tensor_alone():
    layout = build_layout({"parallel": {"pipeline": 2, "tensor": 2}}, 4)
    context: Any = SimpleNamespace(layout=layout, get_global_rank=lambda: 1)
    plain = place(nn.Parameter(torch.ones(2, 3)), {ParallelMode.TENSOR: Shard(0)})
    declared = place(nn.Parameter(torch.ones(2, 3)), {ParallelMode.TENSOR: Shard(0)}, shape=(5, 3))
    whole = place(nn.Parameter(torch.ones(2, 3)), {}, shape=(2, 3))
    tied = place(nn.Parameter(torch.ones(2, 3)), {ParallelMode.PIPELINE: Tied((0, 1), "wte")})
    found = [_alone((name,), one, context) for name, one in zip("abcd", (plain, declared, whole, tied), strict=True)]
    assert [one.label for one in found] == ["a", "b", "c", "tie:wte"]
    assert [one.holders for one in found] == [(1,), (1,), (0, 1), (0, 1, 2, 3)]
    assert [one.sharers for one in found] == [(0, 1), (0, 1), (0, 1), (0, 1, 2, 3)]
    assert [one.may_be_uneven for one in found] == [False, True, False, False]
    assert _uneven_sizes(found) == {"b": {"0": [1, 2]}}


def test_uneven_parts_begin_where_those_before_them_end():
    told = [{"w": {"0": [0, 3]}}, {"w": {"0": [1, 4]}}, {"w": {"0": [1, 4]}}, {"w": {"0": [2, 1]}}, {}]
    assert [_uneven_offset(uneven("w", at, 3), 0, 8, told) for at in range(3)] == [0, 3, 7]
    with pytest.raises(CheckpointError, match="3 parts have 3, 4, 1"):
        _uneven_offset(uneven("w", 0, 3), 0, 9, told)
    with pytest.raises(CheckpointError, match="3 parts have 3, None, 1"):
        _uneven_offset(uneven("w", 0, 3), 0, 8, [*told, {"w": {"0": [1, 5]}}])
    with pytest.raises(CheckpointError, match="3 parts have 3, None, None"):
        _uneven_offset(uneven("w", 0, 3), 0, 8, told[:1])


def test_in_one_process_every_tensor_is_found_once_under_all_its_names():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2, bias=False)
            self.b.weight = self.a.weight
            self.register_buffer("kept", torch.zeros(2, dtype=torch.int64))
            self.register_buffer("gone", torch.zeros(2), persistent=False)

        def get_extra_state(self) -> int:
            return 5

    model = Net()
    found = locate_tensors(model, ParallelContext(), "saving")
    assert [(one.label, one.names, one.shape) for one in found] == [
        ("kept", ("kept",), (2,)),
        ("a.weight", ("a.weight", "b.weight"), (2, 3)),
        ("a.bias", ("a.bias",), (2,)),
    ]
    assert all(one.places[0][0].offset == (0,) * len(one.shape) and one.holders == (0,) for one in found)
    assert found[1].local.data_ptr() == model.a.weight.data_ptr()
    assert not any(one.may_be_uneven for one in found)
    assert extra_states(model) == {"_extra_state": 5}
    model.register_state_dict_post_hook(lambda module, state, *_: state.update({"a.bias": state["a.bias"].clone()}))
    with pytest.raises(CheckpointError, match=r"does not hold the parameters a.bias"):
        locate_tensors(model, ParallelContext(), "saving")
