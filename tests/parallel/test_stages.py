"""The stages of one rank: names and state of the whole model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colonnade.context.parallel_mode import ParallelMode
from colonnade.parallel.placement import Shard, Tied, is_placed, place, placement_of
from colonnade.parallel.split import Chunks, split, take_stages


def two_of_four() -> tuple[nn.Sequential, Chunks]:
    """A model, and the stages of the first of two ranks, stages going round."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    chunks = take_stages(split(model, num_stages=4), [0, 1, 0, 1], 0)
    assert isinstance(chunks, Chunks)
    return model, chunks


def test_the_names_are_those_of_the_whole_model() -> None:
    _, chunks = two_of_four()
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert list(chunks.state_dict()) == [name for name, _ in chunks.named_parameters()] == names
    assert chunks.get_submodule("2") is dict(chunks.named_modules())["2"]
    assert chunks.get_submodule("") is chunks
    with pytest.raises(AttributeError):
        chunks.get_submodule("3")


def test_loading_tells_what_is_missing_and_unexpected_in_all_stages() -> None:
    model, chunks = two_of_four()
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    for name in ("0.bias", "2.weight"):
        del state[name]
    found = chunks.load_state_dict(state, strict=False)
    assert found.missing_keys == ["0.bias", "2.weight"]
    assert found.unexpected_keys == ["1.bias", "1.weight", "3.bias", "3.weight"]
    assert chunks.state_dict()["0.weight"].eq(1).all()
    with pytest.raises(RuntimeError, match=r"unexpected keys for the stages of this rank: 1\.bias"):
        chunks.load_state_dict(state)
    whole = chunks.load_state_dict(chunks.state_dict())
    assert (whole.missing_keys, whole.unexpected_keys) == ([], [])


def test_a_module_of_two_stages_is_named_once() -> None:
    layer = nn.Linear(2, 2)
    chunks = Chunks([nn.ModuleDict({"a": layer}), nn.ModuleDict({"b": layer})])
    assert [name for name, _ in chunks.named_modules()] == ["", "a", ""]
    assert [name for name, _ in chunks.named_modules({layer})] == ["", ""]
    assert [name for name, _ in chunks.named_parameters()] == ["a.weight", "a.bias"]


def shared(*stages: int) -> tuple[nn.Module, nn.Parameter]:
    """Four layers, those at `stages` with one weight."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    weight = place(model[stages[0]].weight, {ParallelMode.TENSOR: Shard(0)}, (4, 2))
    for stage in stages:
        model[stage].weight = weight
    return model, weight


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_stages_of_several_ranks_share_is_tied_on_these(rank: int) -> None:
    model, weight = shared(0, 1, 2)
    taken = take_stages(split(model, num_stages=4), [0, 1, 0, 2], rank)
    assert isinstance(taken, Chunks) == (rank == 0)
    placed = placement_of(weight)
    assert placed.tied == (Tied((0, 1), "0.weight") if rank < 2 else None)
    assert (placed.shards, placed.shape) == ({ParallelMode.TENSOR: Shard(0)}, (4, 2))
    assert not any(is_placed(layer.bias) for layer in model)


def test_what_stages_of_one_rank_share_stays_one_parameter() -> None:
    model, weight = shared(0, 2)
    chunks = take_stages(split(model, num_stages=4), [0, 1, 0, 1], 0)
    assert placement_of(weight).tied is None
    assert len(list(chunks.parameters())) == 3
