"""A model that is split over ranks and evaluated on one of them: an error by name, and no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import colonnade
from colonnade._launch import launch
from colonnade.comm import waits
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.errors import GradientError
from colonnade.testing import run_world
from tests.gradients.scenarios import numbers
from tests.ranks import on_ranks

TENSOR = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).double()


def _train(engine: Any, step: int) -> None:
    engine.zero_grad()
    engine.backward(engine(numbers(3, 8, seed=step)).square().mean())
    engine.step()


def _evaluate(engine: Any, through_engine: bool, mode: bool) -> torch.Tensor:
    engine.train(mode)
    with torch.no_grad():
        out = (engine if through_engine else engine.model)(numbers(3, 8, seed=100))
    engine.train()
    return out


def _alone(through_engine: bool, mode: bool, after: int, before: bool) -> str:
    """Rank 0 evaluates by itself after some steps; `before`: after all ranks have evaluated once."""
    waits.PUBLISH_AFTER = 0.3
    with launch(TENSOR, context=ParallelContext(), verbose=False) as gpc:
        rank, model = (
            gpc.get_global_rank(),
            colonnade.parallelize(_net(), {"*.up": "colwise", "*.down": "rowwise"}, context=gpc),
        )
        engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
        for step in range(after):
            _train(engine, step)
        if before:
            _evaluate(engine, through_engine, mode)
        said = ""
        if rank == 0:
            with pytest.raises(GradientError) as caught:
                _evaluate(engine, through_engine, mode)
            engine.train()
            said = str(caught.value)
        for step in range(2):  # whoever catches the error can go on
            _train(engine, step)
        engine.close()
        return said


ALONE = [(False, False, 0, False), (True, False, 2, True), (False, True, 1, False), (False, False, 1, True)]


def _each_alone() -> list[str]:
    return [_alone(*case) for case in ALONE]


def test_one_rank_that_evaluates_alone_is_named_before_it_has_a_number():
    for case, said in zip(ALONE, run_world(2, _each_alone, timeout=60).values[0], strict=True):
        meanwhile = f"rank 1 is in the forward pass of step {case[2]} meanwhile"
        assert f"rank 0 calls the model outside of a training step, and {meanwhile}" in said, case
        assert "over ranks 0, 1 of TENSOR" in said
        assert said.endswith("[C130]")


def _part_alone(part: str) -> None:
    """Rank 0 evaluates a part of the model, or what a wrapper has inside, as `generate` of peft does."""
    waits.PUBLISH_AFTER = 0.3
    with launch(TENSOR, context=ParallelContext(), verbose=False) as gpc:
        wrapper = nn.Sequential(nn.Sequential(_net()))
        model = colonnade.parallelize(wrapper, {"0.0.*.up": "colwise", "0.0.*.down": "rowwise"}, context=gpc)
        engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
        inside = model.get_submodule(part)
        for step in range(2):
            _train(engine, step)
            plain = _net().eval()
            plain.load_state_dict({name[4:]: value for name, value in engine.full_state_dict().items()})
            engine.eval()
            with torch.no_grad():
                x = numbers(3, 8, seed=100)
                torch.testing.assert_close(inside(x), plain.get_submodule(part[4:])(x))
            engine.train()
        if gpc.get_global_rank() == 0:
            engine.eval()
            with (
                pytest.raises(GradientError, match=r"rank 0 calls the model outside of a training step, .*\[C130\]$"),
                torch.no_grad(),
            ):
                inside(numbers(3, 8, seed=100))
            engine.train()
        _train(engine, 2)
        engine.close()


@on_ranks(2, timeout=60)
def test_one_rank_that_evaluates_a_part_of_the_model_is_named_too():
    for part in ("0", "0.0", "0.0.1"):
        _part_alone(part)


@on_ranks(2, timeout=30)
def test_ranks_that_evaluate_together_and_replicas_that_do_so_alone_have_the_numbers_of_one_process():
    """All ranks evaluate: the numbers of one process, also where one comes late; nothing stays behind."""
    with launch(TENSOR, context=ParallelContext(), verbose=False) as gpc:
        plain, model = _net(), colonnade.parallelize(_net(), {"*.up": "colwise", "*.down": "rowwise"}, context=gpc)
        engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.0), context=gpc)[0]
        hooks = len(model._forward_pre_hooks)
        assert hooks >= 1
        for step in range(3):
            for through_engine in (False, True):
                torch.testing.assert_close(_evaluate(engine, through_engine, False), plain(numbers(3, 8, seed=100)))
            _train(engine, step)
        engine.close()
        assert len(model._forward_pre_hooks) == hooks - 1
    with launch({"parallel": {"data": 2}}, context=ParallelContext(), verbose=False) as gpc:
        engine = initialize(_net(), lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
        assert not engine.model._forward_pre_hooks
        if gpc.get_global_rank() == 0:
            _evaluate(engine, False, False)
        _train(engine, 0)
        engine.close()
