"""Float8 on a GPU that has it: near bf16, and in products of float8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="float8 needs such a GPU"
)


def trained(more: dict[str, Any]) -> tuple[Tensor, str]:
    """The losses of a few steps, and the names of the kernels of the last."""
    with launch({"bf16": True, **more}, context=ParallelContext(), verbose=False) as gpc:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(2)]
        model = nn.Sequential(*blocks, nn.Linear(256, 64))
        engine = initialize(model, lambda p: torch.optim.AdamW(p, lr=1e-3), nn.CrossEntropyLoss(), context=gpc)[0]
        x, y = torch.randn(100, 256, device="cuda"), torch.randint(64, (100,), device="cuda")
        losses, kernels = [], ""
        for step in range(6):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                engine.zero_grad()
                loss = engine.criterion(engine(x), y)
                engine.backward(loss)
                engine.step()
            losses.append(loss.detach().float())
            kernels = " ".join(event.name for event in profile.events() or ()) if step else ""
        engine.close()
        return torch.stack(losses).cpu(), kernels


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_stays_near_bf16(recipe):
    pytest.importorskip("torchao", reason="float8 is an optional extra")
    if recipe == "rowwise" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("rowwise needs 9.0")
    plain, without = trained({})
    found, kernels = trained({"float8": {"recipe": recipe}})
    assert "_scaled_mm" in kernels
    assert "_scaled_mm" not in without
    torch.testing.assert_close(found, plain, rtol=0.03, atol=0.03)
