"""Loops as users of DDP, Accelerate or plain torch write them: equal to one process, or refused by name."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from colonnade._launch import launch
from colonnade.checkpoint.manager import CheckpointManager
from colonnade.comm import waits
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.errors import ConfigError, GradientError, PlacementError
from colonnade.nn import Linear
from colonnade.nn.layer import arrange
from colonnade.testing import compare, gather_weights, run_world
from tests.engine.twins import CONFIGS, twins
from tests.gradients.scenarios import numbers
from tests.ranks import on_ranks


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.third = (nn.Linear(5, 5).double() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def _batch(rank: int, step: int) -> Tensor:
    return numbers(3, 5, seed=10 * step + rank)


def _loss(model: Any, rank: int, step: int) -> Tensor:
    return model(_batch(rank, step)).square().mean()


def _clip(model: nn.Module, config: dict[str, Any]) -> None:
    if "clip_grad_norm" in config:
        torch.nn.utils.clip_grad_norm_(model.parameters(), config["clip_grad_norm"])


@on_ranks(2)
def test_two_engines_of_which_one_leaves_gradients_in_the_other():
    """The generator's backward pass leaves gradients in the discriminator, which has an engine of its own."""
    for config in CONFIGS:
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            rank, models, plain = gpc.get_global_rank(), [Net(1), Net(2)], [Net(1), Net(2)]
            engines = [initialize(one, lambda p: SGD(p, lr=0.5), context=gpc)[0] for one in models]
            optimizers = [SGD(one.parameters(), lr=0.5) for one in plain]

            def losses(parts: Any, r: int, step: int) -> list[Any]:
                make, judge = parts
                return [
                    lambda: judge(make(_batch(r, step))).square().mean(),
                    lambda: (judge(_batch(r, step + 50)) - judge(make(_batch(r, step)).detach())).square().mean(),
                ]

            for step in range(4):
                for at in (1, 0):
                    engines[at].zero_grad()
                    engines[at].backward(losses(engines, rank, step)[at]())
                    engines[at].step()
                    optimizers[at].zero_grad()
                    sum(losses(plain, r, step)[at]() / 2 for r in range(2)).backward()
                    _clip(plain[at], config)
                    optimizers[at].step()
            for truth, model in zip(plain, models, strict=True):
                compare(dict(truth.named_parameters()), gather_weights(model, gpc), 1e-10)
            for engine in engines:
                engine.close()


@on_ranks(2)
def test_a_loop_that_leaves_the_engine_out_is_told_so():
    for config in CONFIGS:
        for steps_before in (0, 2):
            with launch(config, context=ParallelContext(), verbose=False) as gpc:
                model, rank = Net(), gpc.get_global_rank()
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
                engine = initialize(model, optimizer, context=gpc)[0]
                for step in range(steps_before):
                    engine.zero_grad()
                    engine.backward(_loss(engine, rank, step))
                    engine.step()
                optimizer.step()  # on nothing
                optimizer.zero_grad()
                _loss(model, rank, 7).backward()
                with pytest.raises(GradientError, match=r"neither reduced over the ranks.*engine\.backward\(loss\)"):
                    optimizer.step()
                engine.zero_grad()
                engine.backward(_loss(engine, rank, 8))
                engine.step()
                gather_weights(model, gpc)
                engine.close()


@on_ranks(2)
def test_two_engines_take_turns_with_one_optimizer():
    for config in CONFIGS[:3]:
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            model, plain, rank = Net(), Net(), gpc.get_global_rank()
            optimizer, truth = (SGD(one.parameters(), lr=0.1) for one in (model, plain))
            engines = [initialize(model, optimizer, context=gpc)[0] for _ in range(2)]
            for step in range(6):
                engine = engines[step % 2]
                engine.zero_grad()
                engine.backward(_loss(engine, rank, step))
                engine.step()
                truth.zero_grad()
                sum(_loss(plain, r, step) / 2 for r in range(2)).backward()
                _clip(plain, config)
                truth.step()
            compare(dict(plain.named_parameters()), gather_weights(model, gpc), 1e-10)
            for engine in engines:
                engine.close()


@on_ranks(2)
def test_gradients_that_nobody_steps_on_are_cleared_too():
    """The third layer has gradients, and no optimizer: they count in the norm of their own step, and of no later one."""
    for config in [*CONFIGS, {"zero": 3, "clip_grad_norm": 0.1}]:
        with twins(config, Net, lambda m: SGD([*m.first.parameters(), *m.second.parameters()], lr=0.1)) as both:
            for step in range(4):
                both.train(_loss, step)
                both.follow(_loss, step)


class Normed(SGD):
    """Divides each gradient by its norm, or in groups with nesterov each row of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rows = parameter.grad.norm(dim=-1, keepdim=True)
                    parameter.sub_(parameter.grad / (rows if group["nesterov"] else parameter.grad.norm()))


@on_ranks(2)
def test_an_optimizer_that_needs_whole_weights_is_refused_where_they_are_split():
    with launch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, context=ParallelContext(), verbose=False) as gpc:
        here = arrange(gpc)
        model = nn.Sequential(
            Linear(4, 8, arrangement=here), Linear(8, 4, split="row", arrangement=here), nn.LayerNorm(4)
        )
        rows, columns, whole = ([layer.weight] for layer in model)
        for optimizer, name in (
            (torch.optim.Adafactor(model.parameters()), "0.weight"),
            (torch.optim.Muon([*rows, *columns]), "0.weight"),
            (Normed(model.parameters(), lr=0.1), "0.weight"),
            (Normed([{"params": whole}, {"params": columns, "momentum": 0.1, "nesterov": True}], lr=0.1), "1.weight"),
        ):
            message = (
                rf"{type(optimizer).__name__} updates a shard of a tensor differently .* '{name}' is sharded.*Shard"
            )
            with pytest.raises(GradientError, match=message):
                initialize(model, optimizer, context=gpc)
        drawn = torch.get_rng_state()
        for optimizer in (
            torch.optim.AdamW(model.parameters()),
            torch.optim.RMSprop(model.parameters(), momentum=0.1, centered=True),
            torch.optim.Adafactor(whole),
            Normed([{"params": whole}, {"params": rows, "momentum": 0.1, "nesterov": True}], lr=0.1),
        ):
            initialize(model, optimizer, context=gpc)[0].close()
        knows = Normed(model.parameters(), lr=0.1)
        knows.steps_on_parts = True
        initialize(model, knows, context=gpc)[0].close()
        assert torch.equal(drawn, torch.get_rng_state())


@on_ranks(2)
def test_two_parameters_in_the_same_memory_are_refused():
    for config in CONFIGS:
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            model = Net()
            model.third.weight.data = model.first.weight.data
            with pytest.raises(PlacementError, match=r"'first.weight' and 'third.weight' share memory"):
                initialize(model, SGD(model.parameters(), lr=0.1), context=gpc)
            model.third.weight = model.first.weight
            initialize(model, SGD(model.parameters(), lr=0.1), context=gpc)[0].close()


@on_ranks(2)
def test_an_error_of_the_optimizer_that_is_caught_costs_one_step():
    class Moody(SGD):
        def step(self, closure: Any = None) -> Any:
            if any(float(group["lr"]) == 0 for group in self.param_groups):
                raise ValueError("no rate")
            return super().step(closure)

    for config in CONFIGS:
        with twins(config, Net, lambda model: Moody(model.parameters(), lr=0.1)) as both:
            for step in range(4):
                both.engine.optimizer.param_groups[0]["lr"] = 0.0 if step == 1 else 0.1
                if step == 1:
                    with pytest.raises(ValueError, match="no rate"):
                        both.train(_loss, step)
                else:
                    both.train(_loss, step)
                    both.follow(_loss, step)


def test_what_cannot_be_trained_is_refused_by_name_before_the_first_step():
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
        with pytest.raises(ConfigError, match=r"'1.weight', '1.bias' have no shape yet.*first forward pass"):
            initialize(model, lambda p: SGD(p, lr=0.1), context=gpc)
        with pytest.raises(ConfigError, match=r"LBFGS\.step\(\) needs 'closure'"):
            initialize(Net(), torch.optim.LBFGS, context=gpc)


@on_ranks(2)
def test_a_model_can_be_saved_as_an_object_while_it_trains():
    for config in [*CONFIGS, {"zero": {"stage": 2, "gather_ahead": True}}, {"guard": {"every": 1}}]:
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            model, rank = Net(), gpc.get_global_rank()
            engine = initialize(model, lambda p: SGD(p, lr=0.1), context=gpc)[0]
            for step in range(3):
                engine.wait_for_weights()
                file = io.BytesIO()
                torch.save(engine.model, file)
                file.seek(0)
                for copy in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(engine.model))):
                    assert torch.equal(copy(_batch(rank, step)), model(_batch(rank, step)))
                    copy.load_state_dict(model.state_dict())
                engine.zero_grad()
                engine.backward(_loss(engine, rank, step))
                engine.step()
            engine.close()


def _by_rank_0(what: str, config: dict[str, Any], folder: Path) -> None:
    waits.PUBLISH_AFTER = 0.3
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        model, rank = Net(), gpc.get_global_rank()
        engine = initialize(model, lambda p: torch.optim.AdamW(p, lr=0.1), context=gpc)[0]
        calls = {
            "engine.full_state_dict()": engine.full_state_dict,
            "optimizer.state_dict()": engine.optimizer.state_dict,
            "CheckpointManager()": lambda: CheckpointManager(folder, gpc),
        }
        manager = CheckpointManager(folder / "all", gpc)
        calls["CheckpointManager.save()"] = lambda: manager.save(1, model)
        for step in range(3):
            engine.zero_grad()
            engine.backward(_loss(engine, rank, step))
            engine.step()
            if step == 1 or rank == 0:
                calls[what]()


@pytest.mark.parametrize("shared_memory", ["auto", False])
@pytest.mark.parametrize(
    "what", ["engine.full_state_dict()", "optimizer.state_dict()", "CheckpointManager()", "CheckpointManager.save()"]
)
def test_what_all_ranks_must_call_and_rank_0_calls_alone(what, shared_memory, tmp_path):
    config = {"sync": {"shared_memory": shared_memory}, "zero": 1}
    first, second = run_world(2, _by_rank_0, what, config, tmp_path, check=False).outcomes
    assert f"{what} must be called on all ranks, but rank 1 is" in first.message, first
    assert "of step 1" in first.message
    assert second.kind == "exception", second


class Wrapper:
    """Passes everything on to the optimizer that it holds, as wrappers of other frameworks do."""

    def __init__(self, optimizer: Any) -> None:
        self.inside = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)


def test_a_wrapper_that_passes_step_on_is_an_optimizer():
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        model = nn.Linear(2, 1)
        engine = initialize(model, Wrapper(SGD(model.parameters(), lr=0.5)), context=gpc)[0]
        before = model.bias.item()
        engine.zero_grad()
        engine.backward(engine(torch.zeros(1, 2)).sum())
        engine.step()
        assert model.bias.item() == pytest.approx(before - 0.5)
