"""The values of a checkpoint as a rank of any layout sees them: its own, everybody's, or none. Pure: no world is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.checkpoint.manifest import ItemRecord, LayoutRecord, Manifest
from colonnade.checkpoint.values import SavedValues
from colonnade.context import build_layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.random_state import random_state
from colonnade.errors import CheckpointError

TENSORS = {("rank-00000.safetensors", "t#0"): torch.arange(3), ("rank-00001.safetensors", "t#0"): torch.arange(4)}
TWO = LayoutRecord.of(build_layout({}, 2))


def item(name: str, ranks: tuple[int, ...], value: Any = None) -> ItemRecord:
    """Without a value it is a tensor in the file of the first of its ranks."""
    if value is not None:
        return ItemRecord(name, ranks, value, 0, None, name)
    return ItemRecord(name, ranks, {"$tensor": 0}, 1, f"rank-{ranks[0]:05d}.safetensors", "t")


def values(*items: ItemRecord, rank: int = 0, here: int = 2, step: int = 7) -> SavedValues:
    """What two ranks have saved, as rank `rank` of `here` ranks sees it; seeds that are set are kept in `seeds`."""
    manifest = Manifest(step, 0.0, TWO, (), (), (), None, items)
    seeds: list[int] = []
    context: Any = SimpleNamespace(
        layout=build_layout({}, here), get_global_rank=lambda: rank, device=torch.device("cpu"), set_seed=seeds.append
    )
    reader: Any = SimpleNamespace(manifest=manifest, entry=lambda file, key: TENSORS[file, key])
    found = SavedValues(reader, context)
    found.seeds = seeds  # type: ignore[attr-defined]
    return found


def test_a_value_of_all_ranks_is_everybodys_and_others_are_their_ranks():
    same, apart = item("extra/same", (0, 1), 5), [item("extra/apart", (at,), 10 + at) for at in (0, 1)]
    for rank in (0, 1):
        here = values(same, *apart, rank=rank)
        assert here.same_layout
        assert (here.get("extra/same"), here.get("extra/apart")) == (5, 10 + rank)
        assert here.extras({}) == ({}, {"same": 5, "apart": 10 + rank})
    elsewhere = values(same, *apart, here=1)
    assert not elsewhere.same_layout
    assert elsewhere.get("extra/same") == 5
    assert elsewhere.extras({}) == ({}, {"same": 5})  # what is no one's here is left out, unless it is asked for
    for ask in (lambda: elsewhere.get("extra/apart"), lambda: elsewhere.extras({"apart": None})):
        with pytest.raises(
            CheckpointError, match="extra/apart was not the same on all ranks when it was saved on data 2"
        ):
            ask()
    assert (elsewhere.has("extra/same"), elsewhere.has("extra/none")) == (True, False)


def test_objects_get_their_state_and_other_values_come_back():
    takes: Any = SimpleNamespace(state_dict=dict, load_state_dict=dict)
    found = values(item("extra/a", (0, 1), {"x": 1}), item("extra/b", (0, 1), 2))
    assert found.extras({"a": takes}) == ({"a": {"x": 1}}, {"b": 2})
    assert found.extras({"a": 1, "b": takes}) == ({"b": 2}, {"a": {"x": 1}})
    with pytest.raises(CheckpointError, match="no extra 'c'; it has a, b"):
        found.extras({"c": 1})


@pytest.mark.parametrize(("rank", "here", "own"), [(0, 2, None), (1, 2, [0, 1, 2, 3]), (0, 1, None)])
def test_a_buffer_that_has_drifted_is_its_ranks_own_on_the_same_layout(rank, here, own, caplog):
    found = values(item("buffer/mean", (1,)), rank=rank, here=here).own_buffer("mean")
    assert (None if found is None else found.tolist()) == own
    assert ("mean was not the same on all ranks" in caplog.text) == (here == 1)
    assert values(here=here).own_buffer("var") is None
    assert "var" not in caplog.text


def test_values_of_a_parameter_are_found_by_its_label():
    found = values(item("optimizer/step/a/b", (0,), 3), item("optimizer/note/a/b", (1,), "x"), item("extra/c", (0,), 1))
    assert found.optimizer_state_of("a/b") == {"step": 3, "note": "x"}
    assert found.optimizer_state_of("c") == {}


def test_random_streams_are_put_back_on_the_same_layout_alone():
    context = ParallelContext()
    context.set_seed(3)
    state = random_state(context)
    manifest = Manifest(1, 0.0, LayoutRecord.of(context.layout), (), (), (), None, (item("random", (0,)),))
    reader: Any = SimpleNamespace(manifest=manifest, entry=lambda file, key: state)
    saved = SavedValues(reader, context)
    found, why = saved.random_state()
    assert (found, why) == (state, "")
    drawn = torch.rand(3)
    assert saved.restore_random(found, why) == "restored"
    assert torch.equal(torch.rand(3), drawn)
    assert values().random_state() == (None, "it was imported, without any")
    assert values(item("random", (0,)), here=1).random_state() == (None, "it was saved on data 2")


def test_new_streams_are_derived_from_the_step_and_the_streams_of_the_first_rank():
    first, second = item("random", (0,)), item("random", (1,))
    seeds = []
    for saved in (
        values(first, second, here=1),
        values(first, second, rank=1, here=4),
        values(first, here=1),
        values(second, here=1),
        values(first, second, here=1, step=8),
        values(here=1),
    ):
        assert saved.restore_random(None, "it was saved on data 2") == "re-derived"
        seeds += saved.seeds  # type: ignore[attr-defined]
    assert seeds[0] == seeds[1] == seeds[2]  # on every rank of every layout
    assert len({*seeds}) == 4
