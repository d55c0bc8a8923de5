"""Models and optimizers that cannot be trained rightly, in one process; habits of users are beside `test_habits`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.checks import _steps_otherwise, refuse_non_elementwise, refuse_optimizer
from colonnade.errors import GradientError
from colonnade.parallel.placement import Shard, place
from tests.engine.test_habits import Normed


class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ValueError("it says why at its first step")


def world(ranks: int, **parallel: int) -> Any:
    layout = build_layout({"parallel": parallel}, ranks)
    return SimpleNamespace(
        layout=layout, get_global_rank=lambda: 0, get_world_size=lambda mode: len(layout.group_of(mode, 0))
    )


def test_whether_a_part_is_stepped_on_as_the_whole_is_found_out_by_trying():
    weight = [nn.Parameter(torch.ones(2, 2))]
    for dim in (0, 1):
        assert _steps_otherwise(Normed(weight, lr=0.1), 0, 2, dim)
        assert not _steps_otherwise(torch.optim.SGD(weight, lr=0.1), 0, 2, dim)
        assert not _steps_otherwise(Broken(weight, lr=0.1), 0, 2, dim)
    assert not _steps_otherwise(Normed(weight, lr=0.1, momentum=0.1, nesterov=True), 0, 2, 0)
    assert _steps_otherwise(Normed(weight, lr=0.1, momentum=0.1, nesterov=True), 0, 2, 1)


def test_only_what_is_split_over_several_ranks_is_tried():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    place(model[1].weight, {ParallelMode.TENSOR: Shard(0)})
    for optimizer in (
        Normed(model.parameters(), lr=0.1),
        Normed([{"params": [one]} for one in model.parameters()], lr=0.1),
    ):
        refuse_non_elementwise(optimizer, model, world(1))
        with pytest.raises(GradientError, match=r"Normed steps differently on a shard .* '1.weight' is sharded"):
            refuse_non_elementwise(optimizer, model, world(2, tensor=2))
        refuse_non_elementwise(SimpleNamespace(param_groups=optimizer.param_groups), model, world(2, tensor=2))
        optimizer.steps_on_parts = True
        refuse_non_elementwise(optimizer, model, world(2, tensor=2))
    refuse_non_elementwise(Normed(model[0].parameters(), lr=0.1), model, world(2, tensor=2))


def test_parameters_that_are_not_the_models_matter_where_ranks_see_other_data():
    model, other = nn.Linear(2, 2), nn.Linear(3, 3)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    refuse_optimizer(both, [model], world(1))
    refuse_optimizer(both, [model], world(2, tensor=2))
    refuse_optimizer(both, [model, other], world(2))
    with pytest.raises(GradientError, match=r"\(group 0\) has parameters of shape \(3, 3\), \(3,\)"):
        refuse_optimizer(both, [model], world(2))
    other.requires_grad_(False)
    refuse_optimizer(both, [model], world(2))
