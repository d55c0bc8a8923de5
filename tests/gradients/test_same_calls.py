"""What ranks write down before a collective, and who waits in vain, from one process."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.gradients.probe import SameCalls, find_difference

SUM = "calls all_reduce of 4 elements"


def state(does: str = SUM, calls: int = 1, at: str = "g", ended: bool = False, raised: str = "") -> dict[str, Any]:
    return {"at": at, "does": does, "size": 2, "calls": {"g": calls}, "ended": ended, "raised": raised}


@pytest.mark.parametrize(
    ("other", "quiet", "told"),
    [
        (state(), True, None),
        (state(calls=0, at="", does=""), True, None),  # it is still on its way
        (state("calls broadcast"), False, "rank 1 calls broadcast where rank 0 calls all_reduce"),
        (state(calls=0, at="", does="ends", ended=True), False, r"rank 1 ends where rank 0 .* \(after 0 equal calls"),
        (state(calls=0, at="h") | {"calls": {"h": 1}}, False, None),
        (state("waits", at="h") | {"calls": {"h": 1}}, True, "rank 1 waits where rank 0"),
        (state(calls=0, ended=True, raised="what it said"), False, "^what it said$"),
    ],
)
def test_who_waits_in_vain(other, quiet, told):
    found = find_difference(0, (0, 1), {0: state(), 1: other}, quiet)
    assert found is None if told is None else re.search(told, found or "")


def test_the_first_of_those_who_differ_is_named_and_what_they_do_before_what_they_do_not():
    late = state("ends", calls=0, at="", ended=True)
    elsewhere = state("waits", at="h") | {"calls": {"h": 1}, "size": 3}
    for others, quiet, name in (
        ([state("calls one"), state("calls two")], False, 1),
        ([late, state("calls two")], False, 2),
        ([elsewhere, late], False, 2),
        ([elsewhere, elsewhere], True, 1),
    ):
        found = find_difference(0, (0, 1, 2), dict(enumerate([state(), *others])), quiet)
        assert str(found).startswith(f"rank {name} {others[name - 1]['does']} where rank 0 {SUM} (after 0 equal calls")
    assert find_difference(0, (0, 1), dict(enumerate([state(), state(), state("calls other")])), True) is None


def test_what_is_no_collective_runs_as_it_is_and_one_of_a_single_rank_at_once():
    with launch({}, context=ParallelContext(), verbose=False):
        mesh = init_device_mesh("cpu", (1,))
        parts = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        with SameCalls("the handler", 0) as calls:
            assert torch.ones(2, dtype=torch.int64).dtype is torch.int64
            assert torch.tensor([True, False]).all().item() is False
            assert torch.arange(3).gather(0, torch.tensor([2])).item() == 2
            assert (parts + parts).full_tensor().tolist() == [2.0] * 4
            for _ in range(2):
                dist.all_reduce(torch.ones(3))
            dist.broadcast(torch.ones(7), 0)
        assert calls.summed == {(0,): 6}
        state = json.loads(calls._store.get("rank/0"))
        assert max(state["calls"].values()) >= 3
