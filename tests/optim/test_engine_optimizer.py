"""Which gradients a plain optimizer wants in buckets, and which of them it steps on where they lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade.optim import engine_optimizer
from colonnade.optim.bucket_step import BucketStep
from colonnade.optim.engine_optimizer import PlainOptimizer

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(
    ("flat", "scattered", "in_buckets"),
    [
        (True, (False, False), True),
        (True, (True, False), True),
        (True, (True, True), False),  # kernels find gradients where they lie
        (False, (False, False), False),
        (False, (True, True), False),
    ],
)
def test_which_gradients_lie_in_buckets_for_a_flat_step(monkeypatch, flat, scattered, in_buckets):
    model = nn.Linear(2, 2)
    can = dict(zip(model.parameters(), scattered, strict=True))
    monkeypatch.setattr(engine_optimizer, "can_scatter", lambda parameter, planned_on: can[parameter])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = PlainOptimizer(optimizer, model, None if flat else False)
    assert (made.needs_buckets(), made.is_flat) == (in_buckets, flat)


def entry(count: int, trains: bool = True, size: int = 1) -> Any:
    tensor = nn.Parameter(torch.ones(size), trains)
    return SimpleNamespace(holding=SimpleNamespace(count=count), tensor=tensor)


def context(world_size: int = 1, device: torch.device = CPU) -> Any:
    return SimpleNamespace(world_size=world_size, device=device)


@pytest.mark.parametrize(
    ("counts", "world_size", "device", "whole"),
    [
        ([2, 2], 2, CUDA, True),
        ([2, 1], 2, CUDA, False),
        ([2, 2], 2, CPU, False),
        ([1, 1], 1, CUDA, False),
        ([1, 1], 2, CUDA, False),
        ([], 2, CUDA, True),
    ],
)
def test_on_gpus_that_hold_the_same_each_rank_measures_all(counts, world_size, device, whole):
    optimizer: Any = SimpleNamespace(param_groups=[])
    synchroniser: Any = SimpleNamespace(parameters={}, layout=(), generation=0)
    made = PlainOptimizer(optimizer, nn.Module(), False)
    step = made.make_step(synchroniser, [entry(one) for one in counts], lambda _: 0, context(world_size, device))
    assert step.measures_full_gradient is whole


def test_a_number_stays_where_it_is_if_no_gradient_is_in_a_bucket():
    """At ZeRO 3: a copy to another device would wait for it."""
    step = object.__new__(BucketStep)
    step._buckets = []
    number = torch.ones((), device="meta")
    assert step._where_stepped(number, 1.0) is number
    assert step._where_stepped(None, 1.0).item() == 1.0
