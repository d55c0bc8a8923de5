"""Each distinct value, moment and group is written once, by the first of the ranks that have it. Pure: no world is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade.checkpoint.optimizer_state import ParameterGroup, ParameterState
from colonnade.checkpoint.save import LocalState, SavePlan, plan_save
from colonnade.checkpoint.values import encode
from colonnade.context.parallel_context import ParallelContext
from colonnade.parallel.boxes import full_box
from colonnade.parallel.flat import FlatShard
from colonnade.parallel.placement import Placement
from colonnade.parallel.whole import LocalTensor

RANKS = range(4)


def parameter(holders: Sequence[int] = RANKS, sharers: Sequence[int] = RANKS) -> LocalTensor:
    local = torch.ones(2, 3)
    places = ((full_box(local.shape), full_box(local.shape)),)
    return LocalTensor("w", ("w",), local, Placement(), tuple(holders), tuple(sharers), {}, {}, (2, 3), places)


def planned(
    rank: int,
    buffers: Sequence[Any] = (),
    items: Mapping[str, Any] | None = None,
    optimizer: Sequence[ParameterState] = (),
    groups: Sequence[ParameterGroup] | None = None,
    notes: Sequence[Mapping[str, Any]] = (),
) -> SavePlan:
    state: Any = SimpleNamespace(tensors=[], buffers=buffers, items=items or {}, optimizer=optimizer, groups=groups)
    told = [{"items": {}, "optimizer": {}, **note} for note in notes]
    return plan_save(state, told, rank)


def told_items(plan: SavePlan) -> list[tuple[str, tuple[int, ...]]]:
    return [(item.name, item.ranks) for item in plan.items]


@pytest.mark.parametrize(
    ("digests", "written"),
    [
        ("xxxx", {}),
        ("xyyx", {1: (1, 2)}),
        ("xyzy", {1: (1, 3), 2: (2,)}),
    ],
)
def test_of_a_buffer_that_has_drifted_what_the_first_has_not_is_written_once(digests, written):
    notes = [{"items": {"buffer/w": digest}} for digest in digests]
    for rank in RANKS:
        plan = planned(rank, buffers=[(parameter(), encode(torch.ones(1), "it"))], notes=notes)
        assert told_items(plan) == ([("buffer/w", written[rank])] if rank in written else [])


def test_only_buffers_that_several_ranks_hold_may_drift():
    buffer, weight = parameter((0, 1)), replace(parameter((0, 1)), label="p", tensor=nn.Parameter(torch.ones(2, 3)))
    state = LocalState([weight, buffer], nn.Module(), None, None, ParallelContext())
    assert [one.label for one, _ in state.buffers] == ["w"]
    assert state.groups is None


def test_of_a_value_every_form_is_written_once():
    notes = [{"items": {"extra/e": digest}} for digest in "xyxy"]
    for rank in RANKS:
        plan = planned(rank, items={"extra/e": encode(5, "it")}, notes=notes)
        assert told_items(plan) == ([("extra/e", (rank, rank + 2))] if rank < 2 else [])


@pytest.mark.parametrize(
    ("value", "like", "keys"),
    [
        (5, False, []),
        (torch.ones(()), False, ["optimizer/it/w"]),
        (torch.ones(3), False, ["optimizer/it/w"]),
        (torch.ones(3, 0), False, []),  # there is nothing to write
        (torch.ones(2, 3), True, ["optimizer/it/w"]),
    ],
)
def test_what_is_kept_for_a_parameter_is_written_by_the_first_that_has_stepped(value, like, keys):
    notes = [{"optimizer": {"w": stepped}} for stepped in (False, True, False, True)]
    for rank in (1, 3):
        plan = planned(rank, optimizer=[ParameterState(parameter(), "it", value, like)], notes=notes)
        first = rank == 1
        assert [entry.key for entry in plan.entries] == keys * first
        assert told_items(plan) == ([("optimizer/it/w", (1,))] if first and isinstance(value, int) else [])
        assert (plan.note(None).tensors != "") == (first and not isinstance(value, int))


def test_the_parts_of_a_parameter_are_written_by_those_who_have_stepped_on_them():
    notes = [{"optimizer": {"w": stepped}} for stepped in (True, False, True, True)]
    for rank, holders, knows, writes in ((0, (0, 1), 1, 1), (2, (2, 3), 1, 1), (3, (2, 3), 0, 0), (3, (1, 3), 1, 1)):
        plan = planned(rank, optimizer=[ParameterState(parameter(holders), "it", torch.ones(2, 3), True)], notes=notes)
        assert (plan.note(None).tensors.count("\n"), len(plan.entries)) == (knows, writes)


@pytest.mark.parametrize(
    ("holders", "team", "written"), [((0, 2), (0, 1), 1), ((0, 2), (2, 3), 0), ((1, 0), (0, 2), 0)]
)
def test_of_several_teams_the_one_of_the_first_holder_writes_its_shards(holders, team, written):
    notes = [{"optimizer": {"w": True}}] * 4
    shard = FlatShard(1, 4, team, {})
    kept = ParameterState(parameter(holders), "it", torch.ones(3), True, shard)
    plan = planned(team[0], optimizer=[kept], notes=notes)
    assert len(plan.entries) == written
    assert plan.note(None).spans == [1, 4] * written


def test_a_member_of_a_group_is_named_by_the_first_rank_whose_optimizer_has_it():
    group = ParameterGroup(1, (parameter(),), encode({"lr": torch.ones(1)}, "it"), "SGD")
    notes = [{"optimizer": {}}, {"optimizer": {"w": False}}, {"optimizer": {}}, {"optimizer": {"w": True}}]
    for rank in (1, 3):
        plan = planned(rank, groups=[group], notes=notes)
        assert plan.groups is not None
        assert [(record.index, record.names, record.optimizer) for _, record in plan.groups] == [(1, ("w",), "SGD")] * (
            rank == 1
        )
        assert [entry.key for entry in plan.entries] == ["optimizer/options/1#0"] * (rank == 1)
    assert planned(0, notes=notes).groups is None
