"""A handler that was run for a look is as it was before: its own state, and every random stream."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.gradients.probe import state_put_back


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
