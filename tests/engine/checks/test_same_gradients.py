"""Which gradients count as different between ranks, by the two numbers that each rank has of each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine import checks
from colonnade.engine.checks import SameGradients, _compare
from colonnade.errors import GradientError
from colonnade.parallel.placement import Shard, place

M = ParallelMode
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
        f"the plan leaves {found} replicated, but the ranks of the tensor group have different"
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


# -- one rank, beside another that is made up ---------------------------------------------------------------


@pytest.fixture
def other(monkeypatch) -> Any:
    """What the other rank of the group would send: by default what this one does."""
    other = SimpleNamespace(row=lambda mine: mine, asked=0)

    def gather(mine: Tensor, group: Any) -> Tensor:
        other.asked += 1
        return torch.stack([mine, other.row(mine.clone())])

    monkeypatch.setattr(checks, "gather_rows", gather)
    monkeypatch.setattr(checks, "is_sharded_by_plan", lambda model: hasattr(model, "plan"))
    return other


def cut_model(*, plan: bool = True) -> nn.Module:
    """A split weight and a frozen one, which are not looked at, and two that are."""
    model = nn.Module()
    if plan:
        model.plan = "of rows"  # type: ignore[assignment]
    model.split = place(nn.Parameter(torch.ones(2)), {M.TENSOR: Shard(0)})
    model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    model.weight, model.bias = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))
    return model


def world(tensor: int = 2) -> Any:
    layout = build_layout({"parallel": {"tensor": tensor}}, tensor)
    return SimpleNamespace(
        layout=layout,
        tensor_parallel_size=tensor,
        device=torch.device("cpu"),
        get_global_rank=lambda: 0,
        get_group=lambda mode: mode,
        get_world_size=lambda mode: tensor,
    )


def test_only_of_a_model_that_was_cut_whole_parameters_that_train_are_looked_at(other):
    assert list(SameGradients(cut_model(), world())._watched) == ["weight", "bias"]
    assert not SameGradients(cut_model(plan=False), world()).is_due
    assert not SameGradients(cut_model(), world(tensor=1)).is_due
    assert SameGradients(cut_model(), world()).is_due


def passes(model: nn.Module, scale: float = 1.0) -> None:
    x = torch.arange(6.0).view(3, 2)
    (scale * ((model.weight * x).sum() + model.split.sum())).backward()


def test_gradients_of_all_passes_are_added_and_compared_once(other):
    model = cut_model()
    with launch({}, context=ParallelContext(), verbose=False):
        watch = SameGradients(model, world())
        passes(model)
        one = watch._sums["weight"].clone()
        assert list(watch._sums) == ["weight"]  # the other has no gradient yet
        along = torch.cos(torch.arange(6, dtype=torch.float64) * 1.7)
        x = torch.arange(6, dtype=torch.float64)
        torch.testing.assert_close(one, torch.stack([(x * along).sum(), x.square().sum()]))
        passes(model)
        torch.testing.assert_close(watch._sums["weight"], 2 * one)
        watch.check(complete=False)  # a pass has failed: nothing is compared, and the next step is
        assert (watch.is_due, watch._sums, other.asked) == (True, {}, 1)
        passes(model)
        other.row = lambda mine: mine * torch.tensor([0.0, 1, 1, 1, 1])
        watch.check(complete=True)  # that of the other rank has failed
        assert watch.is_due
        other.row = lambda mine: mine
        passes(model)
        watch.check(complete=True)
        assert not watch.is_due
        assert not model.weight._backward_hooks
        passes(model)
        assert watch._sums == {}


def test_what_only_one_rank_has_is_named(other):
    for at, name in ((1, "weight"), (2, "weight"), (3, "bias"), (4, "bias")):
        model = cut_model()
        with launch({}, context=ParallelContext(), verbose=False):
            watch = SameGradients(model, world())
            passes(model)
            model.bias.sum().backward()
            other.row = lambda mine, at=at: mine.index_fill(0, torch.tensor(at), 1e4)
            with pytest.raises(GradientError, match=f"leaves '{name}' replicated"):
                watch.check(complete=True)
            assert not watch.is_due


def test_gradients_that_are_empty_or_sparse_are_passed_over_and_large_ones_sampled(other, monkeypatch):
    watch = SameGradients(cut_model(), world())
    watch._add("weight", torch.zeros(0, 2))
    watch._add("weight", torch.eye(2).to_sparse())
    assert watch._sums == {}
    monkeypatch.setattr(checks, "_SAMPLED", 2)
    watch._add("weight", torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert watch._sums["weight"][1] == 1 + 16
    watch.close()
    assert not watch.is_due


def test_gradients_that_fsdp_has_summed_are_looked_at_afterwards(other, monkeypatch):
    monkeypatch.setattr(checks, "is_dtensor", lambda parameter: parameter.dim() == 1)
    model = cut_model()
    sent: list[Tensor] = []
    other.row = lambda mine: sent.append(mine) or mine
    with launch({}, context=ParallelContext(), verbose=False):
        watch = SameGradients(model, world())
        passes(model)
        once = watch._sums["weight"].tolist()
        watch.check(complete=False)
        assert sent[-1].tolist() == [0.0, *once, 0.0, 0.0]  # that of the bias has not come
        passes(model)
        model.bias.grad = torch.tensor([3.0, 0.0])
        watch.check(complete=True)
        assert sent[-1].tolist() == [1.0, *once, 3.0, 9.0]
