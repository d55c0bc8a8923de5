"""Sharded state in checkpoints: each rank writes its slices, and any layout and stage reads them, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.checkpoint import CheckpointManager
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.errors import ColonnadeError
from colonnade.optim.zero import ZeroOptimizer
from colonnade.testing import gather_weights, run_world
from tests.gradients.scenarios import numbers
from tests.optim.zero.cases import CASES, Way, engine_of, run_steps
from tests.ranks import on_ranks

State = dict[str, Tensor]
OFF = {"TORCH_DISTRIBUTED_DEBUG": "OFF"}  # under DETAIL, gloo of torch 2.11 does not gather DTensors


class Small(nn.Module):
    """Matrices, a vector, a scalar, a channels-last convolution and a tensor of three dimensions."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(7, 5)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.cube = nn.Parameter(torch.randn(3, 4, 5))
        self.one = nn.Parameter(torch.tensor(0.5))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.one.dtype)
        y = self.lin(x).sum() * self.one + (self.cube * x[0, 0]).square().sum()
        return (y + self.conv(x[:, :6].reshape(-1, 1, 2, 3).repeat(1, 2, 2, 1)).square().sum()).float()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def steps(engine: Any, count: int) -> None:
    for step in range(count):
        engine.zero_grad()
        engine.backward(engine(numbers(2, 7, seed=100 * step).float()))
        engine.step()


def state_of(model: nn.Module, optimizer: Any) -> State:
    """Weights and moments of whole parameters. Collective where they are sharded."""
    found: State = {}
    if isinstance(optimizer, ZeroOptimizer):
        held = optimizer.state_dict()
        whole = {at: held["state"][at] for at in held["state"]}
    else:
        whole = {at: optimizer.state[p] for at, p in enumerate(optimizer.param_groups[0]["params"])}
    for at, (name, parameter) in enumerate(model.named_parameters()):
        found[name] = _full(parameter)
        for slot, value in whole[at].items():
            found[f"{name}/{slot}"] = _full(value)
    return found


def _full(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def save(folder: Path, stage: int, dtype: torch.dtype) -> State:
    with launch({"zero": {"stage": stage}}, context=ParallelContext(), verbose=False) as gpc:
        engine = initialize(Small(dtype), adamw, context=gpc)[0]
        steps(engine, 3)
        with CheckpointManager(folder, gpc) as manager:
            manager.save(3, engine.model, engine.optimizer)
        found = state_of(engine.model, engine.optimizer)
        engine.close()
        return found


def load(folder: Path, stage: int, dtype: torch.dtype, more: int = 0) -> State:
    with launch({"zero": {"stage": stage}}, context=ParallelContext(), verbose=False) as gpc:
        engine = initialize(Small(dtype), adamw, context=gpc)[0]
        steps(engine, 1)  # so that there is something to overwrite
        with CheckpointManager(folder, gpc, read_only=True) as manager:
            manager.load(engine.model, engine.optimizer)
        steps(engine, more)
        found = state_of(engine.model, engine.optimizer)
        steps(engine, 1)  # it can go on
        engine.close()
        return found


def same(truth: State, found: State) -> list[str]:
    return [
        name
        for name, value in truth.items()
        if name not in found or not torch.equal(value.float(), found[name].float())
    ]


def test_saved_under_stage_2_on_4_ranks_loads_anywhere_bitwise(tmp_path):
    truth = run_world(4, save, tmp_path, 2, torch.float32).values[0]
    assert sorted(name for name in truth if name.startswith("cube")) == [
        "cube",
        "cube/exp_avg",
        "cube/exp_avg_sq",
        "cube/step",
    ]
    for world, stage in ((2, 0), (2, 3), (1, 0), (2, 1), (3, 2)):
        for found in run_world(world, load, tmp_path, stage, torch.float32, env=OFF).values:
            assert same(truth, found) == [], f"stage {stage} on {world} ranks"


@pytest.mark.slow
@on_ranks(2, env=OFF)
def test_every_stage_loads_every_other_and_goes_on_alike(tmp_path):
    for saved in (0, 1, 3):
        folder = tmp_path / str(saved)
        truth = save(folder, saved, torch.float32)
        assert same(truth, load(folder, 2, torch.float32)) == []
        first, *others = (load(folder, stage, torch.float32, 2) for stage in (0, 1, 2, 3))
        for other in others:
            for name, value in first.items():
                assert torch.allclose(value, other[name], rtol=1e-5, atol=1e-6), name


def test_masters_travel_and_are_left_where_nobody_has_any(tmp_path):
    truth = run_world(2, save, tmp_path, 2, torch.bfloat16).values[0]
    assert truth["cube/master"].dtype == torch.float32
    assert not torch.equal(truth["cube/master"], truth["cube"].float())
    for found in run_world(3, load, tmp_path, 1, torch.bfloat16).values:
        assert same(truth, found) == []
    wide = run_world(2, load, tmp_path, 3, torch.float32, env=OFF).values[
        0
    ]  # one who has fp32 weights takes the masters
    for name in ("cube", "lin.weight", "one", "conv.weight"):
        assert torch.equal(wide[name], truth[f"{name}/master"])
        assert torch.equal(wide[f"{name}/exp_avg"], truth[f"{name}/exp_avg"])
    plain = run_world(2, load, tmp_path, 0, torch.bfloat16).values[0]
    assert "cube/master" not in plain
    assert torch.equal(plain["cube"], truth["cube"])
    assert torch.equal(plain["cube/exp_avg"], truth["cube/exp_avg"].bfloat16())
    model = Small(torch.bfloat16)
    optimizer = adamw(model.parameters())
    with CheckpointManager(tmp_path, ParallelContext(), read_only=True) as manager:
        manager.load(model, optimizer)
    model(numbers(2, 7, seed=0).float()).backward()
    optimizer.step()  # torch's own, which takes no moments of another type


@on_ranks(2)
def test_state_goes_to_and_comes_from_ordinary_optimizers():
    """The whole state goes into an ordinary optimizer and back; an optimizer with state is taken with it."""
    with launch({"zero": 2}, context=ParallelContext(), verbose=False) as gpc:
        model, plain = Small(), Small()
        started = adamw(model.parameters())
        model(numbers(2, 7, seed=9).float()).backward()
        started.step()
        plain.load_state_dict(model.state_dict())
        reference = adamw(plain.parameters())
        reference.load_state_dict(started.state_dict())
        engine = initialize(model, started, context=gpc)[0]
        assert not started.state, "the whole state must not stay"
        for step in range(2):
            engine.zero_grad()
            reference.zero_grad()
            x = numbers(2, 7, seed=100 * step).float()
            engine.backward(engine(x))
            plain(x).backward()
            engine.step()
            reference.step()
        mine, theirs = engine.optimizer.state_dict(), reference.state_dict()
        for at, slots in theirs["state"].items():
            for name, value in slots.items():
                assert torch.allclose(mine["state"][at][name], value, rtol=1e-5, atol=1e-7), name
        mine["param_groups"][0]["lr"] = 0.25
        engine.optimizer.load_state_dict(mine)
        again = engine.optimizer.state_dict()
        assert again["param_groups"][0]["lr"] == started.param_groups[0]["lr"] == 0.25
        for at, slots in mine["state"].items():
            assert all(torch.equal(value, again["state"][at][name]) for name, value in slots.items())
        engine.close()


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2)
def test_the_optimizer_that_was_given_says_where_its_state_is(stage: int, tmp_path: Path):
    """What was given to `initialize` says where its state is, while the engine lives and after it."""
    with launch({"zero": stage}, context=ParallelContext(), verbose=False) as gpc:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        before = optimizer.state_dict()
        optimizer.load_state_dict(before)
        engine = initialize(model, optimizer, context=gpc)[0]
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        for ask in (
            optimizer.state_dict,
            lambda: optimizer.load_state_dict(before),
            lambda: CheckpointManager(tmp_path, gpc).save(1, engine.model, optimizer),
        ):
            with pytest.raises(ColonnadeError, match=r"Adam.*engine\.optimizer.*\[C121\]$"):
                ask()
        whole = engine.optimizer.state_dict()
        assert sorted(whole["state"]) == [0, 1]
        engine.optimizer.load_state_dict(whole)
        engine.close()
        with pytest.raises(ColonnadeError, match=r"CheckpointManager.*\[C121\]$"):
            optimizer.state_dict()
        optimizer.load_state_dict(whole)
        assert sorted(optimizer.state_dict()["state"]) == [0, 1]


def _resume(name: str, folder: Path, stages: tuple[int, int]) -> None:
    """Save in the middle under one stage, go on under another: as if nothing had happened."""
    case = CASES[name]
    first, second = Way(stages[0], "AdamW", 0.3), Way(stages[1], "AdamW", 0.3)
    with engine_of(case, first) as (engine, gpc):
        run_steps(engine, gpc, case, first, range(3))
        with CheckpointManager(folder, gpc) as manager:
            manager.save(3, engine.model, engine.optimizer)
        run_steps(engine, gpc, case, first, range(3, 5))
        truth = gather_weights(engine.model, gpc)
    with engine_of(case, second) as (engine, gpc):
        with CheckpointManager(folder, gpc) as manager:
            manager.load(engine.model, engine.optimizer)
        run_steps(engine, gpc, case, second, range(3, 5))
        found = gather_weights(engine.model, gpc)
    for key, value in truth.items():
        exact = stages[0] == stages[1]  # the same sums in the same order: not a bit differs
        assert torch.equal(value, found[key]) or not exact, key
        assert torch.allclose(value, found[key], rtol=1e-10, atol=1e-12), key


CHANGES = [(2, 2), (2, 3), (3, 1), (1, 0), (0, 2)]
# Every change and every layout once in `make test`, all pairs of them in `make long`.
PAIRS = [
    pytest.param(name, stages, marks=pytest.mark.slow if at == turn else pytest.mark.long, id=f"{name}-{stages}")
    for at, name in enumerate(CASES)
    for turn, stages in enumerate(CHANGES)
]


@pytest.mark.parametrize(("name", "stages"), PAIRS)
def test_resume_beside_other_modes(name, stages, tmp_path):
    run_world(CASES[name].world, _resume, name, tmp_path, stages)
