"""Activations on a GPU: computed again or kept on the host, the gradients are the same and the memory is less."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from colonnade.context.parallel_context import ParallelContext
from colonnade.models import GPT
from colonnade.nn.activations import ActivationSettings, release_blocks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _passed(given: Any, compiled: bool = False) -> tuple[list[torch.Tensor], int]:
    """Gradients of two passes over one graph, and the bytes that forward leaves."""
    torch.manual_seed(0)
    model = GPT(1000, 256, 256, 4, 6, dropout=0.1, context=ParallelContext()).cuda()
    ActivationSettings.read(given).apply(model, [model])
    if compiled:
        for block in model.blocks:
            block.compile()
    tokens = torch.randint(0, 1000, (8, 256), device="cuda")
    torch.manual_seed(1)
    for _ in range(2):  # the second meets memory and streams as they are in a run
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(tokens).float().logsumexp(-1).mean()
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        loss.backward(retain_graph=not compiled)
        if not compiled:
            loss.backward()
        del loss
    release_blocks(model)
    return [parameter.grad for parameter in model.parameters()], kept


def test_the_same_gradients_in_less_memory() -> None:
    wanted, most = _passed(None)
    settings = {
        "full": {"mode": "full"}, "selective": {"mode": "selective"}, "offload": {"offload": True},
        "both": {"mode": "full", "offload": True},
    }  # fmt: skip
    kept = {}
    for name, given in settings.items():
        found, kept[name] = _passed(given)
        for one, other in zip(wanted, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6 * one.abs().max().item(), msg=name)
    print("bytes kept", most, kept)
    assert kept["both"] < kept["full"] < kept["selective"] < most
    assert kept["offload"] < 0.6 * most


@pytest.mark.parametrize("given", [{"mode": "full"}, {"mode": "selective"}, {"offload": True}], ids=str)
def test_compiled_blocks(given: dict[str, Any]) -> None:
    wanted, most = _passed(None, compiled=True)
    found, kept = _passed(given, compiled=True)
    print("compiled", given, "bytes kept", most, kept)
    assert len(found) == len(wanted)
    assert all(gradient.isfinite().all() for gradient in found)
