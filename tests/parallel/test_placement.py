"""Placement records: what they accept, and that they survive copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from colonnade.context.parallel_mode import ParallelMode as M
from colonnade.errors import PlacementError
from colonnade.parallel.placement import (
    Placement,
    Replicate,
    Shard,
    Tied,
    copy_placement,
    is_dtensor,
    is_placed,
    logical_shape,
    place,
    place_module,
    placement_of,
)


def parameter(*shape):
    return nn.Parameter(torch.zeros(*shape))


def test_an_unplaced_parameter_is_replicated_everywhere():
    assert placement_of(parameter(2)) == Placement()
    assert placement_of(parameter(2)).on(M.TENSOR) == Replicate()
    assert str(Placement()) == "replicated"
    assert Placement() != Placement({M.TENSOR: Shard(0)})
    assert Placement() != "replicated"


def test_a_placement_is_frozen_hashable_and_prints():
    placed = placement_of(place(parameter(2, 3), {M.TENSOR: Shard(-1), M.PIPELINE: Tied((3, 1), "emb")}))
    assert placed.shards == {M.TENSOR: Shard(1)}
    assert placed.tied == Tied((1, 3), "emb")
    assert {placed: 1}[placement_of(place(parameter(2, 3), dict(placed.modes)))] == 1
    assert str(placed) == "{TENSOR: Shard(1), PIPELINE: Tied(1, 3 as 'emb')}"
    assert pickle.loads(pickle.dumps(placed)) == placed
    with pytest.raises(TypeError):
        placed.modes[M.DATA] = Shard(0)


@pytest.mark.parametrize(
    ("modes", "shape", "part"),
    [
        ({M.TENSOR: Shard(2)}, None, "has dimensions 0 to 1"),
        ({M.TENSOR: "row"}, None, "Use Shard(dim), Replicate() or Tied"),
        ({M.TENSOR: Replicate(owes="maybe")}, None, "'auto', 'sum' and 'nothing'"),
        ({M.TENSOR: Tied((0, 1), "x")}, None, "Tied is allowed only for ParallelMode.PIPELINE"),
        ({M.PIPELINE: Tied((1, 1), "x")}, None, "at least two different stages"),
        ({M.PIPELINE: Tied((0, 1), "")}, None, "at least two different stages, and a key"),
        ({M.TENSOR: Shard(-3)}, None, "has dimensions 0 to 1"),
        ({M.TENSOR: Shard(0)}, (5, 4), "cannot be a shard of a full tensor of shape (5, 4)"),
        ({M.TENSOR: Shard(0)}, (4,), "cannot be a shard of a full tensor of shape (4,)"),
        ({M.TENSOR: Shard(0)}, (4, 3, 1), "cannot be a shard of a full tensor of shape (4, 3, 1)"),
        ({M.TENSOR: Shard(0)}, (1, 3), "cannot be a shard of a full tensor of shape (1, 3)"),
        ({"tensr": Shard(0)}, None, "Did you mean 'tensor'"),
    ],
)
def test_bad_placements_are_refused(modes, shape, part):
    with pytest.raises((PlacementError, ValueError)) as error:
        place(parameter(2, 3), modes, shape)
    assert part in str(error.value)


def test_one_rank_may_hold_all_of_an_uneven_whole():
    assert placement_of(place(parameter(2, 3), {M.TENSOR: Shard(0)}, (2, 3))).shape == (2, 3)


def test_a_dtensor_is_known_by_both_of_its_attributes():
    for names in (["placements"], ["device_mesh"], ["device_mesh", "placements"]):
        tensor = torch.zeros(2)
        for name in names:
            setattr(tensor, name, ())
        assert is_dtensor(tensor) == (len(names) == 2)


@pytest.mark.parametrize("dim", [0, -1])
def test_a_single_number_has_nothing_to_cut(dim):
    with pytest.raises(PlacementError) as error:
        place(nn.Parameter(torch.tensor(1.0)), {M.TENSOR: Shard(dim)})
    assert str(error.value).startswith(
        f"Shard({dim}) on ParallelMode.TENSOR: a parameter of shape () has no dimension to shard: "
        "give it one, as torch.ones(1) has"
    )


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_dimensions_count_from_either_end(dim):
    placed = placement_of(place(parameter(2, 3), {M.TENSOR: Shard(dim)}))
    assert placed.modes[M.TENSOR] == Shard(dim % 2)


def test_placements_survive_deepcopy_to_and_pickle():
    model = nn.Linear(4, 2)
    place(model.weight, {M.TENSOR: Shard(0)})
    for other in (copy.deepcopy(model), model.to(torch.float64), pickle.loads(pickle.dumps(model))):
        assert placement_of(other.weight).shards == {M.TENSOR: Shard(0)}
        assert not is_placed(other.bias)
    again = copy.deepcopy(copy.deepcopy(model))
    assert placement_of(again.weight).shards == {M.TENSOR: Shard(0)}
    assert again.weight.data_ptr() != model.weight.data_ptr()
    assert isinstance(again.weight, nn.Parameter)


def test_tied_parameters_stay_tied_through_deepcopy():
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[1].weight = model[0].weight
    place(model[0].weight, {M.TENSOR: Shard(0)})
    assert copy.deepcopy(model)[0].weight is not model[0].weight
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[1].weight


def test_master_weights_take_the_placement_over():
    source, master = place(parameter(2), {M.TENSOR: Shard(0)}), torch.zeros(2)
    copy_placement(source, master)
    assert placement_of(master) == placement_of(source)
    assert placement_of(master).tie_key == ""
    loose = torch.zeros(2)
    copy_placement(parameter(2), loose)
    assert not is_placed(loose)


def test_the_whole_shape_follows_from_the_local_one_or_is_declared():
    sizes = {M.TENSOR: 4, M.EXPERT: 2}
    even = placement_of(place(parameter(2, 3), {M.TENSOR: Shard(1), M.EXPERT: Shard(1)}))
    assert logical_shape(parameter(2, 3), even, sizes) == (2, 24)
    uneven = placement_of(place(parameter(2, 3), {M.TENSOR: Shard(1)}, shape=(2, 10)))
    assert logical_shape(parameter(2, 3), uneven, sizes) == (2, 10)


def test_a_module_is_placed_by_pattern_or_predicate():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    rules = {"0.weight": {M.TENSOR: Shard(0)}, lambda name, p: p.dim() == 1: {M.TENSOR: Replicate("sum")}}
    assert place_module(model, rules) is model
    assert placement_of(model[0].weight).shards == {M.TENSOR: Shard(0)}
    assert placement_of(model[0].bias).on(M.TENSOR) == Replicate("sum")
    with pytest.raises(PlacementError, match=r"'0\.weigth' matches no parameter.*Did you mean '0\.weight'"):
        place_module(model, {"0.weigth": {}})
