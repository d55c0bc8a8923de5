"""A sharded optimizer is the user's own optimizer: groups, odd parameters, hooks, schedulers, masters, refusals."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.errors import ColonnadeError
from colonnade.testing import compare, gather_weights, run_world
from tests.gradients.scenarios import numbers
from tests.optim.zero.cases import run_all
from tests.ranks import on_ranks

WAYS = [(1, "auto"), (1, False), (2, "auto"), (2, False)]


class Odd(nn.Module):
    """Tied, frozen, uneven, tiny, unused, and sometimes used parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.three = nn.Parameter(torch.randn(3))
        self.unused = nn.Parameter(torch.randn(4, 3))
        self.sometimes = nn.Parameter(torch.randn(7))
        self.tied = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7, bias=False)
        self.again.weight = self.tied.weight
        self.conv = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.frozen.requires_grad_(False)
        self.double()

    def forward(self, x: Tensor, use: bool) -> Tensor:
        y = torch.tanh(self.first(x)) * self.scalar
        y = self.again(torch.tanh(self.tied(self.frozen(y))))
        y = self.conv(y.view(-1, 1, 1, 7)).mean(1).view(-1, 7) + self.three.sum()
        return y + self.sometimes if use else y


def groups(model: nn.Module) -> list[dict[str, Any]]:
    wide = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": wide, "weight_decay": 0.2},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 0.02, "weight_decay": 0.0},
    ]


def batch(step: int, part: int) -> tuple[Tensor, Tensor, bool]:
    """Step 1 uses `sometimes` on one rank only, step 2 on none."""
    use = {1: part == 0, 2: False}.get(step, True)
    return numbers(4, 5, seed=10 * step + part), numbers(4, 7, seed=500 + 10 * step + part), use


def one_process(make: Callable[[Any], Any], steps: int) -> nn.Module:
    model = Odd()
    optimizer = make(groups(model))
    for step in range(steps):
        optimizer.zero_grad()
        losses = [F.mse_loss(model(x, use), y) for x, y, use in (batch(step, part) for part in range(2))]
        (sum(losses) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model


MAKERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda g: torch.optim.AdamW(g, lr=0.05),
    "AdamW, amsgrad": lambda g: torch.optim.AdamW(g, lr=0.05, amsgrad=True),
    "SGD": lambda g: torch.optim.SGD(g, lr=0.05, momentum=0.9, dampening=0.1),
    "RMSprop": lambda g: torch.optim.RMSprop(g, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda g: torch.optim.Adagrad(g, lr=0.05),
    "NAdam": lambda g: torch.optim.NAdam(g, lr=0.01),
    "Adadelta": lambda g: torch.optim.Adadelta(g),
    "ASGD": lambda g: torch.optim.ASGD(g, lr=0.01),
}


def _odd(names: list[str]) -> None:
    for name in names:
        truth = one_process(MAKERS[name], 5)
        for stage, shared_memory in WAYS:
            config = {
                "zero": {"stage": stage, "bucket_mb": 0.0003},
                "clip_grad_norm": 0.1,
                "sync": {"shared_memory": shared_memory},
            }
            with launch(config, context=ParallelContext(), verbose=False) as gpc:
                model = Odd()
                engine = initialize(model, MAKERS[name](groups(model)), context=gpc)[0]
                for step in range(5):
                    x, y, use = batch(step, gpc.get_global_rank())
                    engine.zero_grad()
                    engine.backward(F.mse_loss(engine(x, use), y))
                    engine.step()
                compare(dict(truth.named_parameters()), gather_weights(model, gpc), 1e-10)
                assert torch.equal(model.unused, truth.unused), "a parameter without gradient must not even decay"
                assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
                engine.close()


def test_odd_parameters_with_adamw():
    run_world(2, _odd, ["AdamW"])


@pytest.mark.slow
@pytest.mark.long
def test_odd_parameters_with_many_optimizers():
    run_world(2, _odd, list(MAKERS)[1:], timeout=110)


def _masters() -> None:
    """bf16 parameters are the rounded fp32 masters of an ordinary AdamW on the fp32 sum of the bf16 gradients."""
    for stage in (1, 2):
        config = {"zero": {"stage": stage, "bucket_mb": 0.0003}, "bf16": True}
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3)).bfloat16()
            masters = [p.detach().float().requires_grad_() for p in model.parameters()]
            reference = torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.1)
            engine = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1), context=gpc)[0]
            for step in range(8):
                grads = []
                for part in (1 - gpc.get_global_rank(), gpc.get_global_rank()):
                    model.zero_grad()
                    x = numbers(4, 5, seed=10 * step + part).bfloat16()
                    loss = engine(x).float().square().mean()
                    if part != gpc.get_global_rank():
                        grads.append([g.float() for g in torch.autograd.grad(loss, list(model.parameters()))])
                engine.zero_grad()
                own = [g.float() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)]
                engine.backward(loss)
                engine.step()
                for master, mine, other in zip(masters, own, grads[0], strict=True):
                    master.grad = (mine + other) / 2
                reference.step()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                assert torch.equal(parameter, master.bfloat16())
            before = [p.detach().clone() for p in model.parameters()]
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
            engine.zero_grad()
            engine.backward(engine(numbers(4, 5, seed=0).bfloat16()).float().mean())
            engine.step()
            moved = [(p - b).float().mean().item() for p, b in zip(model.parameters(), before, strict=True)]
            assert min(moved) > 0.9, "loaded weights must reach the masters"
            engine.close()


def _as_an_optimizer() -> None:
    """Schedulers hooks and groups stay the users."""
    with launch({"zero": 2}, context=ParallelContext(), verbose=False) as gpc:
        model, plain = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
        calls: list[str] = []
        original = torch.optim.SGD(model.parameters(), lr=1.0)
        original.register_step_post_hook(lambda *_: calls.append("hook"))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(original, 0.5)
        engine = initialize(model, original, lr_scheduler=scheduler, context=gpc)[0]
        plain.load_state_dict(model.state_dict())
        optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
        reference = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second = torch.optim.lr_scheduler.ConstantLR(engine.optimizer, 0.5, total_iters=2)
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            for step in range(3):
                x = numbers(2, 4, seed=step)
                engine.zero_grad()
                optimizer.zero_grad()
                engine.backward(engine(x).square().mean())
                plain(x).square().mean().backward()
                engine.step()
                optimizer.step()
                scheduler.step()
                reference.step()
        assert second.optimizer is engine.optimizer
        assert calls == ["hook"] * 3
        assert engine.optimizer.param_groups[0] is original.param_groups[0]
        compare(dict(plain.named_parameters()), dict(model.named_parameters()), 1e-12)
        for change in (
            lambda groups: groups.append({**groups[0], "params": [nn.Parameter(torch.zeros(2))]}),
            lambda groups: groups.pop(0),
            lambda groups: groups.append({**groups.pop(0)}),  # options of the other would be read by nobody
        ):
            kept = list(original.param_groups)
            change(original.param_groups)
            with pytest.raises(ColonnadeError, match="were changed after it was sharded"):
                engine.optimizer.step()
            original.param_groups[:] = kept
        engine.optimizer.step()
        original.param_groups[0]["params"].append(nn.Parameter(torch.zeros(2)))
        with pytest.raises(ColonnadeError, match="were changed after it was sharded"):
            engine.optimizer.step()
        engine.close()


def _by_hand() -> None:
    """The optimizer's own step, on gradients that the engine has summed: not clipped, and no closure."""
    with launch({"zero": 1}, context=ParallelContext(), verbose=False) as gpc:
        model, plain = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
        engine = initialize(model, torch.optim.Adam(model.parameters(), lr=0.1), context=gpc)[0]
        plain.load_state_dict(model.state_dict())
        reference = torch.optim.Adam(plain.parameters(), lr=0.1)
        for step in range(3):
            engine.zero_grad()
            reference.zero_grad()
            engine.backward(engine(numbers(2, 4, seed=10 * step + gpc.get_global_rank())).square().mean())
            (sum(plain(numbers(2, 4, seed=10 * step + part)).square().mean() for part in range(2)) / 2).backward()
            engine._sum_gradients()
            engine.optimizer.step()
            engine._end_step()
            reference.step()
        compare(dict(plain.named_parameters()), gather_weights(model, gpc), 1e-12)
        with pytest.raises(ColonnadeError, match="closure"):
            engine.optimizer.step(lambda: 0.0)
        engine.close()


@pytest.mark.parametrize("gather_ahead", [False, True])
@on_ranks(2)
def test_a_step_by_hand_waits_for_ranks_that_still_read_the_weights_of_the_last_one(gather_ahead: bool):
    """Rank 1 reads its weights for a while between two steps that no sum separates."""
    config = {"zero": {"stage": 1, "gather_ahead": gather_ahead}}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        model = nn.Linear(40, 30)
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), context=gpc)[0]
        engine.backward(engine(numbers(2, 40, seed=0).float()).square().mean())
        engine.step()
        engine.wait_for_weights()
        first = model.weight.detach().clone()
        if gpc.get_global_rank() == 1:
            time.sleep(0.5)
            assert torch.equal(model.weight, first), "the other rank has written its next step into this rank's weights"
        for _ in range(2):
            engine.optimizer.step()
        engine.wait_for_weights()
        gradient = engine.optimizer.whole_gradient(model.weight)
        torch.testing.assert_close(model.weight.detach(), first - 0.2 * gradient)
        engine.close()


class Counting(torch.optim.SGD):
    """Counts its steps in the group, as some optimizers do, and remembers what it was given."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / group["step"])


def _counting() -> None:
    """An optimizer of ones own that keeps count in its groups."""
    with launch({"zero": 2}, context=ParallelContext(), verbose=False) as gpc:
        model = nn.Linear(3, 3, bias=False).double()
        engine = initialize(model, lambda p: Counting(p, lr=1.0), context=gpc)[0]
        assert "step" not in engine.optimizer.param_groups[0], "trying it out must leave no trace"
        before = model.weight.detach().clone()
        for _ in range(3):
            engine.zero_grad()
            engine.backward(engine(torch.ones(1, 3, dtype=torch.float64)).sum())
            engine.step()
        assert engine.optimizer.param_groups[0]["step"] == 3
        assert torch.allclose(before - model.weight, torch.full((3, 3), 1 + 1 / 2 + 1 / 3, dtype=torch.float64))
        engine.close()


class Neighbours(torch.optim.SGD):
    """Divides each gradient by its norm, without nesterov: what one element gets depends on the others."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / (1.0 if group["nesterov"] else parameter.grad.norm()))


def _second_group(parameters: Any) -> Neighbours:
    """Of the two groups the second is not element-wise, as in optimizers with a trust ratio for matrices alone."""
    weight, bias = parameters
    return Neighbours([{"params": [bias], "nesterov": True, "momentum": 0.1}, {"params": [weight]}], lr=0.1)


def _refusals() -> None:
    """What cannot be sharded is refused by name."""
    cases: list[tuple[Callable[[Any], Any], dict[str, Any], str]] = [
        (torch.optim.LBFGS, {}, r"LBFGS.step\(\) needs 'closure'"),
        (lambda p: Neighbours(p, lr=0.1), {}, "Neighbours is not element-wise"),
        (_second_group, {}, "Neighbours is not element-wise. In group 1"),
        (lambda p: torch.optim.Adafactor(p), {}, "Adafactor"),
        (torch.optim.Adagrad, {"flat_step": True}, "flat_step=True"),
    ]
    for make, more, message in cases:
        context = ParallelContext()
        with launch({"zero": 1, **more}, context=context, verbose=False), pytest.raises(ColonnadeError, match=message):
            initialize(nn.Linear(4, 4), make, context=context)
    with launch({"zero": 1}, context=ParallelContext(), verbose=False) as gpc:
        model = nn.Embedding(6, 3, sparse=True)
        engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
        engine.backward(engine(torch.tensor([1, 2])).sum())
        with pytest.raises(ColonnadeError, match="'weight' is sparse"):
            engine.step()
        engine.close()
    with launch({"zero": 1}, context=ParallelContext(), verbose=False) as gpc:
        model = nn.Linear(3, 3)
        model.bias.requires_grad_(False)
        engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), context=gpc)[0]
        assert engine.optimizer.state_dict()["state"] == {}  # before the first step
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
        assert list(engine.optimizer.state_dict()["state"]) == [0]  # none of what is frozen
        model.bias.requires_grad_(True)
        engine.backward(engine(torch.ones(2, 3)).sum())
        with pytest.raises(ColonnadeError, match="'bias' was frozen"):
            engine.step()
        engine.close()


def _skip() -> None:
    """A step that is not finite anywhere is dropped everywhere."""
    for stage in (1, 2):
        config = {"zero": stage, "clip_grad_norm": 1.0}
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            model = nn.Linear(4, 3)
            engine = initialize(model, lambda p: torch.optim.AdamW(p, lr=0.1), context=gpc)[0]
            before = model.weight.detach().clone()
            x = torch.ones(2, 4)
            if gpc.get_global_rank() == 1:
                x[0, 0] = float("inf")
            for inputs, skipped in ((x, True), (torch.ones(2, 4), False)):
                engine.zero_grad()
                engine.backward(engine(inputs).mean())
                engine.step()
                assert engine.last_step_skipped is skipped
                assert torch.equal(model.weight, before) is skipped
            engine.close()


def _loss_scale() -> list[tuple[dict[str, Tensor], float, int]]:
    """fp16 with a scale so large that the first steps overflow."""
    found = []
    for stage in (0, 1, 2):
        config = {"zero": stage, "fp16": {"init_scale": 2.0**24}, "clip_grad_norm": 1.0}
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
            engine = initialize(model, lambda p: torch.optim.AdamW(p, lr=0.05), context=gpc)[0]
            for step in range(12):
                engine.zero_grad()
                engine.backward(engine(numbers(3, 8, seed=10 * step + gpc.get_global_rank()).float()).float().mean())
                engine.step()
            found.append((gather_weights(model, gpc), float(engine.loss_scale), engine.skipped_steps))
            engine.close()
    return found


@pytest.mark.slow
def test_the_loss_scale_of_fp16_falls_and_steps_alike_at_every_stage():
    (weights, scale, skipped), *others = run_world(2, _loss_scale).values[0]
    assert 0 < skipped < 12
    for other_weights, *numbers_ in others:
        assert numbers_ == [scale, skipped]
        compare(weights, other_weights, 1e-3)


def _methods(clip: dict[str, Any]) -> list[Any]:
    """Norms and weights under every stage."""
    found = []
    for stage in (0, 1, 2, 3):
        config = {"zero": stage, "clip_grad_norm": clip}
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))).double()
            engine = initialize(model, lambda p: torch.optim.AdamW(p, lr=0.05), context=gpc)[0]
            norms = []
            for step in range(8):
                engine.zero_grad()
                x = numbers(3, 5, seed=10 * step + gpc.get_global_rank()) * (20 if step == 6 else 1)
                engine.backward(engine(x).square().mean())
                engine.step()
                norms.append({name: value.item() for name, value in engine.grad_norms().items()})
            found.append((norms, gather_weights(model, gpc)))
            engine.close()
    return found


CLIPS: list[dict[str, Any]] = [
    {"max_norm": 0.1, "norm_type": "inf"},
    {"method": {"type": "adagc", "warmup": 2}, "per": "parameter"},
    {"method": {"type": "zclip", "warmup": 2}, "groups": {"biases": {"params": "*.bias", "max_norm": 0.05}}},
    {"method": {"type": "skip_on_spike", "window": 8, "bound": 50.0}, "report": "layer", "norm_type": 3},
    {"method": {"type": "percentile", "window": 4}},
]


@pytest.mark.slow
@on_ranks(2, timeout=110)
def test_every_clip_method_is_the_same_at_every_stage():
    for clip in CLIPS:
        (norms, weights), *stages = _methods(clip)
        for other_norms, other in stages:
            for here, there in zip(norms, other_norms, strict=True):
                assert here == pytest.approx(there, rel=1e-10), clip
            compare(weights, other, 1e-10)


def test_the_users_own_optimizer_on_two_ranks():
    """Masters, schedulers and hooks, steps by hand, counts in groups, refusals, dropped steps."""
    run_world(2, run_all, [_masters, _as_an_optimizer, _by_hand, _counting, _refusals, _skip], timeout=110)
