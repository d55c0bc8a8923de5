"""Models and optimizers that cannot be trained rightly, in one process; habits of users are beside `test_habits`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade.context.layout_builder import build_layout
from colonnade.engine.checks import _steps_otherwise, refuse_optimizer
from colonnade.errors import GradientError
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
