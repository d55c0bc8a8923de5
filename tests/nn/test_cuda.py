"""Activations on a GPU: computed again or kept on the host, the gradients are the same and the memory is less."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from colonnade.config.settings import ActivationSettings
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.activations import apply_activations, kept_on_host, release_blocks
from colonnade.models import GPT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _passed(given: Any, compiled: bool = False) -> tuple[list[torch.Tensor], int]:
    """Gradients of two passes, and the bytes that the forward pass leaves."""
    torch.manual_seed(0)
    dropout = 0.0 if compiled else 0.1  # compiled code draws other numbers
    model = GPT(1000, 256, 256, 4, 6, dropout=dropout, context=ParallelContext()).cuda()
    settings = ActivationSettings.read(given)
    apply_activations(model, settings, [model])
    if compiled:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    tokens = torch.randint(0, 1000, (8, 256), device="cuda")
    torch.manual_seed(1)
    for _ in range(2):  # the second meets memory and streams as they are in a run
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(tokens).float().logsumexp(-1).mean()
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        del loss
    release_blocks(model)
    return [parameter.grad for parameter in model.parameters()], kept


def _compare(wanted: list[torch.Tensor], found: list[torch.Tensor], name: str, rtol: float) -> None:
    for at, (one, other) in enumerate(zip(wanted, found, strict=True)):
        assert (one - other).norm() <= rtol * one.norm(), (name, at)


def test_the_same_gradients_in_less_memory() -> None:
    wanted, most = _passed(None)
    settings = {
        "full": {"mode": "full"},
        "selective": {"mode": "selective"},
        "offload": {"offload": True},
        "both": {"mode": "full", "offload": True},
    }
    kept = {}
    for name, given in settings.items():
        found, kept[name] = _passed(given)
        _compare(wanted, found, name, 1e-5)
    print("bytes kept", most, kept)
    assert kept["both"] < kept["full"] < kept["selective"] < most
    assert kept["offload"] < 0.6 * most


def test_the_same_gradients_compiled() -> None:
    wanted, most = _passed(None, compiled=True)
    for name, given in {"selective": {"mode": "selective"}, "offload": {"offload": True}}.items():
        found, kept = _passed(given, compiled=True)
        _compare(wanted, found, name, 1e-2)
        assert kept < most, name


def test_what_lies_on_the_host_comes_back_twice() -> None:
    """As for a second backward pass over one graph."""
    weight = torch.randn(512, 512, device="cuda", requires_grad=True)
    x = torch.randn(512, 512, device="cuda", requires_grad=True)
    grads = []
    for aside in (False, True):
        with kept_on_host([weight]) if aside else nullcontext():
            y = ((x @ weight).sin() @ weight).t().cos()
        twice = [torch.autograd.grad(y.sum(), (x, weight), retain_graph=again) for again in (True, False)]
        grads.append([*twice[0], *twice[1]])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)
