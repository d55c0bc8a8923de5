"""The probe in one process: a handler is as it was before the look, and ranks that call different things are found."""

from __future__ import annotations

import json
import random
import re
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.gradients.probe import SameCalls, find_difference, state_put_back


def use(handler: Any) -> None:
    torch.rand(1)
    random.random()
    torch.rand(1, generator=handler.generator)
    handler.number, handler.new = 2, "new"
    handler.tensor.resize_(5).fill_(7)
    handler.entries["a"].add_(1)
    handler.entries["b"].append(3)
    del handler.entries["a"]
    handler.lists[1]["c"] = 2
    handler.lists.clear()
    handler.past.append(3)
    handler.seen.add(3)
    handler.pair[0].add_(1)
    handler.pair[1].clear()
    handler.ring.clear()
    with torch.no_grad():
        handler.weight.add_(1)
    raise KeyError


def test_everything_it_holds_gets_its_content_back_in_place():
    weight, ring = nn.Parameter(torch.ones(2)), [1]
    ring.append(ring)  # type: ignore[arg-type]
    handler = SimpleNamespace(
        number=1,
        tensor=torch.ones(3),
        generator=torch.Generator().manual_seed(3),
        entries={"a": torch.zeros(2), "b": [1, 2]},
        lists=[torch.zeros(1), {"c": 1}],
        past=deque([1, 2], maxlen=2),
        seen={1, 2},
        pair=(torch.zeros(2), [5]),
        weight=weight,
        ring=ring,
    )
    before = dict(vars(handler))
    draw = torch.rand(1, generator=torch.Generator().manual_seed(3))
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        state, own = torch.get_rng_state(), random.getstate()
        with pytest.raises(KeyError), state_put_back(handler, gpc):
            use(handler)
        assert torch.equal(torch.get_rng_state(), state)
        assert random.getstate() == own
    assert vars(handler).keys() == before.keys()
    assert all(vars(handler)[name] is value for name, value in before.items())
    assert handler.number == 1
    assert torch.equal(handler.tensor, torch.ones(3))
    assert torch.equal(torch.rand(1, generator=handler.generator), draw)
    assert torch.equal(handler.entries["a"], torch.zeros(2))
    assert handler.entries["b"] == [1, 2]
    assert handler.lists[1] == {"c": 1}
    assert list(handler.past) == [1, 2]
    assert handler.seen == {1, 2}
    assert torch.equal(handler.pair[0], torch.zeros(2))
    assert handler.pair[1] == [5]
    assert ring[0] == 1
    assert ring[1] is ring
    assert torch.equal(weight.detach(), torch.full((2,), 2.0))  # not the handler's own


# -- what ranks write down before a collective ---
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
