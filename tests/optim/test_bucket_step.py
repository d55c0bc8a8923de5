"""Norm and step over buckets in one process: gradients that somebody has put elsewhere count as what they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.engine.gradient_handler import BaseGradientHandler
from colonnade.registry import GRADIENT_HANDLER


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def stepped(gpc: ParallelContext, flat: bool, change: str) -> tuple[list[torch.Tensor], float, str | None]:
    """The parameters after two steps, at the second of which a handler changes gradients as said; norm; first_bad."""
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = initialize(model, optimizer, context=gpc)[0]
    for step in range(2):
        engine.zero_grad()
        engine.backward(engine(torch.ones(5, 3, dtype=torch.float64)).square().sum())
        HandChanges.change = change if step == 1 else "none"
        engine.step()
        bad = engine._stepper._step.first_bad()
    assert (engine._stepper._step.flat is not None) == flat
    norm = engine.grad_norm.item()
    engine.close()
    return [parameter.detach().clone() for parameter in model.parameters()], norm, bad


@GRADIENT_HANDLER.register_module
class HandChanges(BaseGradientHandler):
    """Writes gradients by hand, as a handler may."""

    change = "none"

    def covers(self) -> list:
        return []

    def handle_gradient(self) -> None:
        first, second, *_ = self._model.parameters()
        if self.change == "replaced":
            second.grad = torch.full_like(second, 5.0)
        elif self.change == "taken away":
            first.grad = None
        elif self.change == "not finite":
            second.grad[1] = torch.nan


@pytest.mark.parametrize("change", ["none", "replaced", "taken away", "not finite"])
def test_the_flat_step_sees_the_gradients_that_the_optimizer_would_see(change):
    results = []
    for flat in (True, False):
        config = {"clip_grad_norm": 1.0, "flat_step": flat, "gradient_handlers": [{"type": "HandChanges"}]}
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            results.append(stepped(gpc, flat, change))
    (found, norm, bad), (expected, expected_norm, expected_bad) = results
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert norm == pytest.approx(expected_norm, rel=1e-12, nan_ok=True)
    assert bad == expected_bad == ("0.bias" if change == "not finite" else None)


def test_a_replaced_gradient_is_stepped_on():
    with launch({"gradient_handlers": [{"type": "HandChanges"}]}, context=ParallelContext(), verbose=False) as gpc:
        model = built()
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), context=gpc)[0]
        before = model[0].bias.detach().clone()
        HandChanges.change = "replaced"
        engine.zero_grad()
        engine.backward(engine(torch.ones(5, 3, dtype=torch.float64)).square().sum())
        engine.step()
        torch.testing.assert_close(model[0].bias.detach(), before - 5.0)
        engine.close()
