"""Errors that one rank alone meets in a step: every rank raises them, at once, and the world can go on."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.comm import waits
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.engine.gradient_handler import BaseGradientHandler
from colonnade.errors import GradientError
from colonnade.registry import GRADIENT_HANDLER
from colonnade.testing import run_world
from tests.gradients.scenarios import numbers
from tests.ranks import on_ranks

CONFIGS: list[dict[str, Any]] = [
    {},
    {"sync": {"shared_memory": False}, "clip_grad_norm": 1.0},
    {"zero": 1},
    {"zero": 2, "clip_grad_norm": 1.0},
]


def _loss(out: Tensor, counted: bool) -> Any:
    return (out.square().sum(), out.numel()) if counted else out.square().mean()


def _step(engine: Any, seed: int, accumulation: int, wrong: dict[int, Any]) -> None:
    """One step; `wrong`: what is given in place of the loss, or done, by pass (the last: before `step`)."""
    for at in range(accumulation):
        engine.zero_grad()
        out = engine(numbers(3, 4, seed=seed + at))
        act = wrong.get(at)
        engine.backward(act(engine, out) if act is not None else _loss(out, counted=True))
        if accumulation in wrong and at == accumulation - 1:
            wrong[accumulation](engine, out)
        engine.step()


def _plain_mean(engine: Any, out: Tensor) -> Any:
    return _loss(out, counted=False)


def _no_count(engine: Any, out: Tensor) -> Any:
    return out.square().sum(), -1


def _vector(engine: Any, out: Tensor) -> Any:
    return out.square()


def _change(engine: Any, out: Tensor) -> None:
    for parameter in engine.model.parameters():
        parameter.grad.mul_(2.0)


def _again(engine: Any, out: Tensor) -> None:
    engine.backward(_loss(engine(numbers(3, 4, seed=0)), counted=True))


def _too_soon(engine: Any, out: Tensor) -> Any:
    engine.step()
    return _loss(out, counted=True)


SLIPS: list[tuple[int, int, Any, str]] = [
    (3, 0, _plain_mean, "the loss was a mean before"),
    (3, 1, _plain_mean, r"the loss was \(sum, count\) before"),
    (2, 0, _no_count, "the count of a loss given as"),
    (1, 0, _vector, "a loss must be one number"),
    (1, 1, _change, "was changed between backward and step"),
    (2, 2, _again, r"backward\(\) was called 3 times"),
    (1, 0, _too_soon, r"step\(\) was called before backward"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@on_ranks(2, timeout=40)
def test_an_error_of_one_rank_in_a_step_is_raised_on_all(config: dict[str, Any]):
    """In step 1 and in step 3, which is not compared; after it all ranks make a step together."""
    for accumulation, at, slip, said in SLIPS:
        with launch({**config, "gradient_accumulation": accumulation}, context=ParallelContext(), verbose=False) as gpc:
            torch.manual_seed(0)
            model = nn.Linear(4, 3).double()
            engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
            for step in range(5):
                wrong = step in (1, 3) and gpc.get_global_rank() == 0
                before, began = [p.detach().clone() for p in model.parameters()], time.monotonic()
                if step in (1, 3):
                    with pytest.raises(GradientError, match=said) as caught:
                        _step(engine, 10 * step, accumulation, {at: slip} if wrong else {})
                    assert wrong or "on rank 0 (this rank is 1)" in str(caught.value)
                    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
                else:
                    _step(engine, 10 * step, accumulation, {})
                assert time.monotonic() - began < 5
            engine.zero_grad()
            engine.close()


@pytest.mark.parametrize(
    ("config", "told"),
    [({}, "use one form"), ({"sync": {"shared_memory": False}}, "a mean on rank 1 and (sum, count) on rank 0")],
)
@on_ranks(2, timeout=30)
def test_one_rank_that_changes_to_sums_in_a_step_that_is_not_compared_is_named(config: dict[str, Any], told):
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        model = nn.Linear(4, 3).double()
        engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
        for step in range(6):
            engine.zero_grad()
            out = engine(numbers(3, 4, seed=step))
            engine.backward(_loss(out, counted=step == 5 and gpc.get_global_rank() == 0))
            if step == 5:
                with pytest.raises(GradientError) as caught:
                    engine.step()
            else:
                engine.step()
        engine.close()
        said = str(caught.value)
    assert told in said
    assert said.endswith("[C045]")


@GRADIENT_HANDLER.register_module
class RaisesOnce(BaseGradientHandler):
    """Sums by hand; raises where it is told to, before its sum."""

    raises = False

    def handle_gradient(self):
        if self.raises:
            raise ValueError("a mistake in my handler")
        for parameter in self._model.parameters():
            dist.all_reduce(parameter.grad, group=self.context.get_group(ParallelMode.DATA))
            parameter.grad /= self.context.data_parallel_size


def _handler_raises() -> str:
    waits.PUBLISH_AFTER = 0.3
    with launch({"gradient_handler": ["RaisesOnce"]}, context=ParallelContext(), verbose=False) as gpc:
        engine = initialize(nn.Linear(4, 3), lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
        try:
            for step in range(9):
                RaisesOnce.raises = step == 2 and gpc.get_global_rank() == 1
                engine.zero_grad()
                engine.backward(engine(torch.ones(2, 4)).sum())
                engine.step()
        except ValueError as error:
            time.sleep(2)  # as a process does that ends slowly; then its connections close
            raise error
        except GradientError as error:
            return str(error)
    raise AssertionError("nobody raised")


def test_while_others_wait_for_a_rank_whose_handler_raised_they_are_told_its_error():
    result = run_world(2, _handler_raises, timeout=30, check=False)
    first, second = result.outcomes
    assert second.message == "a mistake in my handler"
    said = result.stderr[0]
    assert (
        "rank 1: outside the engine, after an error summing the gradients: ValueError: a mistake in my handler" in said
    )
    assert first.ok, first.headline
    assert "rank 1 has exited while this rank was summing the gradients" in first.value
