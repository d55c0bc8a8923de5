"""What a slice keeps of what was kept for its whole parameter, and how it travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.errors import CheckpointError, GradientError
from colonnade.optim.engine_optimizer import state_dtypes
from colonnade.optim.zero import ZeroOptimizer
from colonnade.optim.zero.zero_optimizer import ParameterShard, _as_shard, _decoded, _kind, shard_of

WHOLE = nn.Parameter(torch.arange(6.0).reshape(2, 3))
PART = ParameterShard(WHOLE, 0, 1, 4, torch.tensor([1.0, 2.0, 3.0]))


def test_a_state_is_cut_as_its_parameter_unless_it_is_a_step():
    state = 10 * WHOLE.detach()
    assert torch.equal(shard_of(state, PART, "exp_avg"), torch.tensor([10.0, 20.0, 30.0]))
    assert torch.equal(shard_of(state.t().contiguous().t(), PART, "exp_avg"), torch.tensor([10.0, 20.0, 30.0]))
    assert torch.equal(shard_of(state, PART, "step"), state)
    found = shard_of(state, PART, "exp_avg")
    found.zero_()
    assert state[0, 1] == 10.0  # a copy
    step = torch.tensor(3.0)
    taken = shard_of(step, PART, "step")
    assert torch.equal(taken, step)
    assert taken is not step
    value = {"a": [1]}
    assert shard_of(value, PART, "other") == value
    assert shard_of(value, PART, "other") is not value
    assert PART.local.shape == (2, 3)


@pytest.mark.parametrize(
    ("value", "name", "expected"),
    [
        (torch.tensor([7.0, 8.0, 9.0]), "exp_avg", [7.0, 8.0, 9.0]),
        (WHOLE.detach(), "exp_avg", [1.0, 2.0, 3.0]),
        (torch.tensor([7.0, 8.0]), "exp_avg", [7.0, 8.0]),
        (torch.tensor([[7.0, 8.0, 9.0]]), "exp_avg", [[7.0, 8.0, 9.0]]),
        (torch.tensor(5.0), "step", 5.0),
    ],
)
def test_what_was_loaded_is_cut_where_it_is_for_the_whole(value, name, expected):
    assert _as_shard(value, PART, name).tolist() == expected


def test_a_slice_that_fits_is_taken_itself_and_a_step_is_not():
    slices = torch.tensor([7.0, 8.0, 9.0])
    assert _as_shard(slices, PART, "exp_avg") is slices
    assert _as_shard(slices, PART, "step") is not slices
    assert _as_shard(3, PART, "count") == 3


def test_kinds_of_state():
    assert _kind(torch.zeros(3, dtype=torch.bfloat16), PART) == ["like", "bfloat16"]
    assert _kind(torch.tensor(2.0), PART) == ["value", "float32", 2.0, []]
    assert _kind(torch.tensor([[2]]), PART) == ["value", "int64", 2, [1, 1]]
    assert _kind("text", PART) == ["value", None, "text"]
    for value in (2.5, None, torch.tensor([[2]], dtype=torch.int8), torch.tensor(True)):
        found = _decoded(_kind(value, PART))
        assert found == value
        assert not isinstance(value, torch.Tensor) or (found.dtype, found.shape) == (value.dtype, value.shape)
    with pytest.raises(
        CheckpointError,
        match=r"^optimizer state has shape \(2,\); it must have one value, or one value for each element",
    ):
        _kind(torch.zeros(2), PART)


@pytest.mark.parametrize(
    ("make", "dtypes"),
    [
        (lambda p: torch.optim.AdamW(p, foreach=True), (torch.bfloat16, torch.bfloat16)),
        (lambda p: torch.optim.SGD(p, lr=0.1), ()),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), (torch.bfloat16,)),
        (torch.optim.LBFGS, ()),  # cannot be tried without a closure
    ],
)
def test_the_dtypes_of_what_is_kept_of_each_element(make, dtypes):
    assert state_dtypes(make([WHOLE]), torch.bfloat16) == dtypes


# -- a sharded optimizer on the one rank there is -------------------------------------------------------------


def layers(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    model[2].bias.requires_grad_(False)
    return model


def groups(model: nn.Module) -> list[dict[str, Any]]:
    first, second, *rest = model.parameters()
    return [{"params": [first, rest[1]], "lr": 0.05}, {"params": [second, rest[0]], "weight_decay": 0.0}]


def passed(model: nn.Module, step: int, without: bool = False) -> Tensor:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
    return (model[1](model[0](x)) if without else model(x)).float().square().mean()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_and_gradients_of_whole_parameters_come_and_go(stage, dtype):
    config = {"zero": {"stage": stage, "bucket_mb": 0.0001}, "clip_grad_norm": 0.5}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        plain, masters = layers(dtype), dtype is torch.bfloat16
        if masters:
            plain.float()
        truth = torch.optim.AdamW(groups(plain), lr=0.1)
        model = layers(dtype)
        engine = initialize(model, torch.optim.AdamW(groups(model), lr=0.1), context=gpc)[0]
        optimizer = engine.optimizer
        assert isinstance(optimizer, ZeroOptimizer)
        assert bool(optimizer.masters) is masters
        assert optimizer.numel == 4 * 3 + 4 + 2 * 4
        assert sorted(p.numel() for group in optimizer.stepped.param_groups for p in group["params"]) == [4, 8, 12]
        assert optimizer._ahead is None
        assert not optimizer._bucket_step.measures_full_gradient
        for step in range(3):
            engine.zero_grad()
            truth.zero_grad()
            engine.backward(passed(engine.model, step, step == 1))
            outcome = engine._sum_gradients()
            slices = {id(p): (start, stop, grad) for p, start, stop, grad in optimizer.gradient_slices()}
            for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                if not one.requires_grad:
                    assert not optimizer.shards(one)
                    assert optimizer.flat_shard(one) is None
                    continue
                whole = optimizer.whole_gradient(one)
                assert (whole is None) is (step == 1 and name == "2.weight"), name
                start, stop, grad = slices[id(one)]
                assert (start, stop) == (0, one.numel())
                assert (grad is None) is (whole is None)
                other.grad = None if whole is None else whole.to(other.dtype)
                assert whole is None or (whole.shape == one.shape and torch.equal(grad, whole.flatten()))
            engine._finish_step(outcome)
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            truth.step()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other.to(dtype))
        found, expected = optimizer.state_dict(), truth.state_dict()
        assert list(found["state"]) == list(expected["state"]) == [0, 2, 3]
        for number, state in expected["state"].items():
            kept = dict(found["state"][number])
            master = kept.pop("master", None) if masters else None
            assert (master is not None) is masters
            torch.testing.assert_close(kept, state)
        assert [group["params"] for group in found["param_groups"]] == [[0, 1], [2, 3]]
        assert [group["lr"] for group in found["param_groups"]] == [0.05, 0.1]
        shard = optimizer.flat_shard(model[0].weight)
        assert shard is not None
        assert (shard.start, shard.stop) == (0, 12)
        engine.close()
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        again = layers(dtype)
        again.load_state_dict(model.state_dict())
        engine = initialize(again, torch.optim.AdamW(groups(again), lr=0.7), context=gpc)[0]
        engine.optimizer.load_state_dict(found)
        for either in (engine.optimizer, engine.optimizer.stepped):
            assert [group["lr"] for group in either.param_groups] == [0.05, 0.1]
        torch.testing.assert_close(engine.optimizer.state_dict(), found)
        with pytest.raises(
            GradientError, match=r"groups of \[1, 2\] parameters, but this optimizer has groups of \[2, 2\]"
        ):
            engine.optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}, {"params": [1, 2]}]})
        for numbered in found["state"].values():
            numbered.pop("master", None)
        engine.optimizer.load_state_dict(found)  # masters are what the weights are
        for mine in engine.optimizer.masters:
            assert torch.equal(mine, mine.to(dtype).to(mine.dtype))
        engine.close()


def test_a_step_by_hand_weights_from_elsewhere_and_what_is_refused():
    config = {"zero": {"stage": 1, "gather_ahead": True}}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        model, plain, heard = layers(torch.float64), layers(torch.float64), []
        original = torch.optim.SGD(groups(model), lr=0.1, momentum=0.9)
        engine = initialize(model, original, context=gpc)[0]
        optimizer, truth = engine.optimizer, torch.optim.SGD(groups(plain), lr=0.1, momentum=0.9)
        assert optimizer._ahead is not None

        def looks(*_: Any) -> None:
            heard.append("looks")

        looks.only_looks = True  # type: ignore[attr-defined]
        optimizer.register_step_pre_hook(lambda *_: heard.append("hook"))
        optimizer.register_step_pre_hook(looks)
        for step in range(3):
            if step == 2:
                for one in (model, plain):
                    one[0].weight.data = torch.full_like(one[0].weight, 0.5)
            engine.zero_grad()
            truth.zero_grad()
            engine.backward(passed(engine.model, step))
            passed(plain, step).backward()
            engine._sum_gradients()
            heard.clear()
            optimizer.step()
            assert heard.count("hook") == 1
            assert "looks" in heard
            engine._end_step()
            truth.step()
            optimizer.wait()
            torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))
        for either in (optimizer, original):
            assert either._opt_called
        with pytest.raises(GradientError, match="does not support a closure"):
            optimizer.step(lambda: 0.0)
        model[2].bias.grad = torch.ones(2, dtype=torch.float64)
        with pytest.raises(GradientError, match=r"'2\.bias' was frozen when the optimizer was sharded"):
            optimizer.step()
        model[2].bias.grad = None
        optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(1)))
        with pytest.raises(GradientError, match="were changed after it was sharded"):
            optimizer.step()
        optimizer.param_groups[0]["params"].pop()
        assert optimizer.stepped._optimizer_load_state_dict_post_hooks
        assert not getattr(original, "is_sharded_elsewhere", False)
        engine.close()
        assert not optimizer.stepped._optimizer_load_state_dict_post_hooks
        assert original.is_sharded_elsewhere  # its state is here
