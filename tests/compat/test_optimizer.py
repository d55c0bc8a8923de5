"""Lamb and Lars against their formulas written plainly, and the fused Adams against torch's own."""

from __future__ import annotations

import math

import pytest
import torch

from colonnade.compat.old_nn import CPUAdam, FusedAdam, HybridAdam, Lamb, Lars
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError, PlacementError
from colonnade.parallel.placement import Shard, place


def gradients(steps: int = 4) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    return [torch.randn(3, 2, generator=source, dtype=torch.float64) for _ in range(steps)]


def start() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64))


def stepped(make) -> list[float]:
    parameter = start()
    optimizer = make([parameter])
    for gradient in gradients():
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach().flatten().tolist()


def norm(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values))


def lamb(lr: float, b1: float, b2: float, eps: float, decay: float, scaled: bool) -> list[float]:
    w = start().detach().flatten().tolist()
    m, v = [0.0] * len(w), [0.0] * len(w)
    for gradient in gradients():
        g = gradient.flatten().tolist()
        m = [b1 * a + (1 - b1) * b for a, b in zip(m, g, strict=True)]
        v = [b2 * a + (1 - b2) * b * b for a, b in zip(v, g, strict=True)]
        r = [a / (math.sqrt(b) + eps) + decay * x for a, b, x in zip(m, v, w, strict=True)]
        ratio = norm(w) / norm(r) if scaled else 1.0
        w = [x - lr * ratio * a for x, a in zip(w, r, strict=True)]
    return w


def lars(lr: float, momentum: float, eeta: float, decay: float, eps: float) -> list[float]:
    w = start().detach().flatten().tolist()
    held = [0.0] * len(w)
    for gradient in gradients():
        g = gradient.flatten().tolist()
        ratio = eeta * norm(w) / (norm(g) + decay * norm(w) + eps)
        held = [momentum * h + ratio * (a + decay * x) for h, a, x in zip(held, g, w, strict=True)]
        w = [x - lr * h for x, h in zip(w, held, strict=True)]
    return w


@pytest.mark.parametrize("adam", [False, True])
def test_lamb_is_its_formula(adam: bool) -> None:
    found = stepped(lambda p: Lamb(p, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.01, adam=adam))
    assert found == pytest.approx(lamb(0.1, 0.8, 0.9, 1e-6, 0.01, not adam), rel=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_lars_is_its_formula(momentum: float) -> None:
    found = stepped(lambda p: Lars(p, lr=0.5, momentum=momentum, eeta=0.02, weight_decay=0.01, epsilon=1e-8))
    assert found == pytest.approx(lars(0.5, momentum, 0.02, 0.01, 1e-8), rel=1e-12)


@pytest.mark.parametrize("make", [Lamb, Lars])
def test_zero_weights_are_stepped_on_and_closures_are_called(make) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = make([parameter], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (parameter + 1).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert parameter.isfinite().all()
    assert parameter.abs().min() > 0


def test_a_parameter_that_is_split_is_refused() -> None:
    parameter = start()
    place(parameter, {ParallelMode.TENSOR: Shard(0)})
    parameter.grad = gradients()[0]
    for make in (Lamb, Lars):
        with pytest.raises(PlacementError, match=r"needs the norm of each full parameter.*Shard\(0\)"):
            make([parameter]).step()


@pytest.mark.parametrize(
    "bad", [lambda p: Lamb(p, lr=-1), lambda p: Lamb(p, betas=(1.0, 0.9)), lambda p: Lars(p, eeta=-1)]
)
def test_bad_options_are_named(bad) -> None:
    with pytest.raises(ConfigError):
        bad([start()])


@pytest.mark.parametrize("make", [FusedAdam, HybridAdam, CPUAdam])
@pytest.mark.parametrize("decoupled", [True, False])
def test_fused_adams_are_torchs(make, decoupled: bool) -> None:
    theirs = torch.optim.AdamW if decoupled else torch.optim.Adam
    assert type(make([start()])) is torch.optim.AdamW
    found = stepped(lambda p: make(p, lr=0.1, weight_decay=0.1, adamw_mode=decoupled))
    assert found == pytest.approx(stepped(lambda p: theirs(p, lr=0.1, weight_decay=0.1)), rel=1e-9)
    with pytest.raises(ConfigError, match="bias_correction=False"):
        make([start()], bias_correction=False)
