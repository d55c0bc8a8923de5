"""Checks of an engine, by themselves: advice, unfit models and optimizers, sums of gradients that must be equal, and a loop that is watched."""

from __future__ import annotations

import gc
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine import checks
from colonnade.engine.checks import LoopWatch, _compare, _steps_otherwise, ordered_sum, refuse_optimizer
from colonnade.errors import GradientError
from colonnade.parallel.placement import place
from tests.engine.test_habits import Normed


# -- advice ---
@pytest.fixture
def said(monkeypatch):
    said: list[str] = []

    def warning(text: str, ranks: list[int] | None = None) -> None:
        assert ranks in (None, [0])
        said.append(text)

    logger = SimpleNamespace(warning=warning)
    monkeypatch.setattr(checks, "get_dist_logger", lambda: logger)
    return said


def world(ranks: int, rank: int = 0, **parallel: Any) -> Any:
    layout = build_layout({"parallel": parallel}, ranks)
    return SimpleNamespace(
        layout=layout,
        device=torch.device("cpu"),
        get_global_rank=lambda: rank,
        get_group=lambda mode: mode,
        get_world_size=lambda mode: len(layout.group_of(mode, rank)),
        pipeline_parallel_size=parallel.get("pipeline", 1),
        tensor_parallel_size=parallel.get("tensor", 1),
    )


@pytest.mark.parametrize(
    ("context", "layer", "is_said"),
    [
        (world(2), nn.BatchNorm1d(2), True),
        (world(2), nn.BatchNorm1d(2).eval(), False),
        (world(2), nn.SyncBatchNorm(2), False),
        (world(2), nn.LayerNorm(2), False),
        (world(1), nn.BatchNorm1d(2), False),
        (world(2, rank=1), nn.BatchNorm1d(2), False),  # the first rank of a stage says it
        (world(4, rank=1, tensor=2), nn.BatchNorm1d(2), False),
        (world(2, tensor=2), nn.BatchNorm1d(2), False),
        (world(2, pipeline=2), nn.BatchNorm1d(2), True),
        (world(2, rank=1, pipeline=2), nn.BatchNorm1d(2), True),
    ],
)
def test_batch_norms_that_see_a_part_of_the_batch(said, context, layer, is_said):
    checks.warn_of_batch_norm(nn.Sequential(nn.Linear(2, 2), layer), context)
    assert len(said) == is_said
    if is_said:
        assert said[0].startswith("BatchNorm1d (1) normalises over the rows of one rank")


def test_of_many_batch_norms_three_are_named(said):
    checks.warn_of_batch_norm(nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(3))), world(2))
    checks.warn_of_batch_norm(nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(4))), world(2))
    assert ["..." in text for text in said] == [False, True]


def model(spec: Any = None) -> nn.Module:
    made = nn.Linear(2, 2)
    if spec is not None:
        place(made.weight, {ParallelMode.TENSOR: spec})
    return made


# -- models and optimizers that cannot be trained rightly ---
class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ValueError("it says why at its first step")


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
    with pytest.raises(GradientError, match=r"group 0 of the optimizer has parameters of shape \(3, 3\), \(3,\)"):
        refuse_optimizer(both, [model], world(2))
    other.requires_grad_(False)
    refuse_optimizer(both, [model], world(2))


# -- a user's own loop ---
def watched(sync: Any = None) -> tuple[nn.Linear, torch.optim.SGD, LoopWatch]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, LoopWatch(model, optimizer, ParallelContext(), sync)


def test_parameters_are_looked_at_in_the_first_steps_and_then_rarely(monkeypatch):
    looked: list[int] = []
    _, _, watch = watched()
    monkeypatch.setattr(LoopWatch, "look", lambda self: looked.append(self._steps))
    for _ in range(250):
        watch.end_step()
    assert looked == [1, 2, 100, 200]
    watch.close()


def test_a_watch_that_is_gone_looks_at_nothing_and_one_whose_model_is_gone_neither():
    model, _, watch = watched()
    model.bias = nn.Parameter(torch.zeros(2))
    del watch
    gc.collect()
    model.load_state_dict(model.state_dict())
    model, _, watch = watched()
    del model
    gc.collect()
    watch.end_step()
    watch.close()


def steps(optimizer: torch.optim.Optimizer) -> bool:
    try:
        optimizer.step()
    except GradientError:
        return False
    return True


def test_of_two_engines_of_one_optimizer_either_may_have_summed():
    syncs = [SimpleNamespace(synchroniser=SimpleNamespace(unprepared_gradients=True)) for _ in range(2)]
    model, optimizer, one = watched(syncs[0])
    two = LoopWatch(model, optimizer, ParallelContext(), syncs[1])  # type: ignore[arg-type]
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    assert steps(optimizer)  # there is no gradient
    model.bias.grad = torch.zeros(2)
    assert not steps(optimizer)
    syncs[1].synchroniser.unprepared_gradients = False
    assert steps(optimizer)
    two.unsummed = True
    assert not steps(optimizer)
    two.close()
    assert one.unprepared_gradients
    assert not steps(optimizer)  # the other still looks
    del one
    gc.collect()
    assert steps(optimizer)


def test_blocks_that_compute_activations_again_are_given_back():
    model = nn.Sequential(nn.Linear(2, 2))
    watch = LoopWatch(model, SimpleNamespace(), ParallelContext())
    vars(model[0])["_colonnade_runs"] = "how"
    watch.close()
    assert model[0]._colonnade_runs is None


def test_another_order_and_any_other_number_give_another_sum():
    assert ordered_sum(torch.tensor([], dtype=torch.int64)) == 0
    assert ordered_sum(torch.tensor([5])) == 5
    given = [*permutations([1, 2, 3]), [0, 2, 0], [1, 0, 1], [1, 2], [0, 1, 2], [1, 2, 4]]
    assert len({int(ordered_sum(torch.tensor(numbers))) for numbers in given}) == len(given)
    for at in range(9):  # the highest bit of any of them
        numbers = torch.ones(9, dtype=torch.int64)
        numbers[at] += torch.iinfo(torch.int64).min
        assert ordered_sum(numbers) != ordered_sum(torch.ones(9, dtype=torch.int64))


HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def compare(*ranks: list[tuple[float, float]], dtype: torch.dtype = SINGLE) -> None:
    names = [f"p{at}" for at in range(len(ranks[0]))]
    sums = torch.tensor([[(along, norm**2) for along, norm in rank] for rank in ranks], dtype=torch.float64)
    _compare(names, [dtype] * len(names), sums)


def test_what_is_alike_or_nothing_but_rounding_passes():
    compare([(1.0, 2.0), (0.0, 0.0), (3.0, 3.0)], [(1.0, 2.0), (0.0, 0.0), (3.0, 3.0)])
    compare([(1.0, 2.0), (3.0, 3.0), (1.0, 1.0)], [(1.0009, 2.0), (3.0, 3.0009), (1.0, 1.0)])
    compare([(1.0, 2.0), (1e-6, 1e-6), (1.0, 1.0)], [(1.0, 2.0), (-1e-6, 1e-6), (1.0, 1.0)])
    compare([(1.0, 1.0)], [(1.09, 1.09)], dtype=HALF)


@pytest.mark.parametrize(
    ("ranks", "dtype", "found"),
    [
        (([(1.0, 2.0), (3.0, 3.0), (1.0, 1.0)], [(1.0, 2.0), (-3.0, 3.0), (1.0, 1.0)]), SINGLE, "'p1'"),
        (([(1.0, 2.0), (3.0, 3.0)], [(1.0, 2.0), (3.0, 3.1)], [(1.0, 2.0), (3.0, 3.0)]), SINGLE, "'p1'"),
        (([(1.0, 2.0)], [(1.0, 2.0)], [(0.0, 2.0)]), DOUBLE, "'p0'"),
        (([(1.0, 1.0), (0.0, 0.0)], [(1.25, 1.25), (0.0, 0.0)], [(1.0, 1.0), (0.0, 0.0)]), HALF, "'p0'"),
        (([(1.0, 1.0), (0.0, 0.0)], [(1.0, 1.0), (1e-3, 1e-3)], [(1.0, 1.0), (0.0, 0.0)]), SINGLE, "'p1'"),
    ],
)
def test_what_differs_is_named(ranks, dtype, found):
    with pytest.raises(GradientError) as error:
        compare(*ranks, dtype=dtype)
    assert str(error.value).startswith(
        f"the TP plan leaves {found} replicated, but the gradient differs between the ranks of the tensor group"
    )


def test_what_is_just_as_large_as_rounding_passes():
    rounding = 100 * 2.0**-23
    compare([(1.0, 1.0), (rounding, rounding)], [(1.0, 1.0), (-rounding, rounding)])
    with pytest.raises(GradientError, match="'p1'"):
        compare([(1.0, 1.0), (rounding, 1.005 * rounding)], [(1.0, 1.0), (-rounding, 1.005 * rounding)])
    compare([(0.0, 1.0)], [(1e-3, 1.0)])


def test_eight_are_named():
    with pytest.raises(GradientError) as error:
        compare([(1.0, 1.0)] * 9, [(-1.0, 1.0)] * 9)
    assert "'p0', 'p1', 'p2', 'p3', 'p4', 'p5', 'p6', 'p7' ... replicated" in str(error.value)
    with pytest.raises(GradientError) as error:
        compare([(1.0, 1.0)] * 8, [(-1.0, 1.0)] * 8)
    assert "'p7' replicated" in str(error.value)
