"""Ranks without a torch group: one alone, never several. Connections of their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from colonnade.comm import groups
from colonnade.comm.groups import RankGroup, own_gloo
from colonnade.errors import GradientError
from colonnade.testing import run_world


def test_one_rank_needs_no_group_and_hears_itself():
    group = RankGroup((3,), None)
    assert group.alone
    assert (group.size, group.index) == (1, 0)
    assert group.gather_objects({"a": 1}) == [{"a": 1}]


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2)])
def test_several_ranks_without_a_group_are_refused(ranks):
    with pytest.raises(GradientError, match="has the process group of"):
        RankGroup(ranks, None)


def test_why_memory_is_not_shared_is_said_or_raised():
    said: list[str] = []
    group = RankGroup((3,), None, said.append)
    group.cannot_share("no room")
    assert said == ["gradients are sent by the process group, not by shared memory: no room"]
    group.share_memory(must=True)  # one rank can share with itself
    with pytest.raises(GradientError, match="shared_memory=True, but no room"):
        group.cannot_share("no room")
    assert len(said) == 1
    group.close()


@pytest.mark.parametrize(("here", "there"), [(None, "no socket there"), ("no socket here", None)])
def test_where_one_rank_cannot_be_reached_none_is_connected(monkeypatch, here, there):
    said: list[str] = []
    closed: list[bool] = []
    sockets = SimpleNamespace(close=lambda: closed.append(True)) if here is None else None
    monkeypatch.setattr(groups, "connect", lambda *_: (sockets, here))
    group = RankGroup((3,), None, said.append)
    monkeypatch.setattr(group, "gather_objects", lambda mine: [mine, there if mine == here else mine])
    group.share_memory(must=False)
    assert said == [f"gradients are sent by the process group, not by shared memory: {here or there}"]
    assert group.sockets is None
    assert closed == [True] * (here is None)


def test_connections_are_closed_once():
    group, closed = RankGroup((3,), None), []
    group.sockets = SimpleNamespace(close=lambda: closed.append(True))  # type: ignore[assignment]
    group.close()
    group.close()
    assert closed == [True]
    assert group.sockets is None


def _talk(opened: list[object]) -> None:
    """Over the group where it moves CPU tensors, else over connections of their own."""
    original = groups.own_gloo
    groups.own_gloo = lambda group: opened.append(group) or original(group)
    for count, config in enumerate([dist.get_backend_config, lambda group: "cuda:nccl"]):
        dist.get_backend_config = config
        group = RankGroup((0, 1), dist.group.WORLD)
        assert len(opened) == count
        assert group.exchange(b"from %d" % dist.get_rank()) == [b"from 0", b"from 1"]
        group.signal(b"%d" % dist.get_rank())
        assert group.gather_objects({"rank": dist.get_rank()}) == [{"rank": 0}, {"rank": 1}]  # while that is under way
        assert group.collect() == [b"0", b"1"]


def test_small_messages_take_the_connections_that_are_there():
    run_world(2, _talk, [])


def connect_and_leave():
    for _ in range(20):
        own_gloo()


def test_a_rank_that_lets_go_of_its_connections_at_once_leaves_the_others_theirs():
    run_world(4, connect_and_leave, timeout=30)
