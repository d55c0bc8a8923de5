"""Checkpoints of a model on a GPU; nothing here runs without one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colonnade.checkpoint import CheckpointManager
from colonnade.context.parallel_context import ParallelContext

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 16, device="cuda")).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("background", [False, True], ids=["now", "background"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path, background, fused):
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 1)).cuda()
        return model, torch.optim.AdamW(model.parameters(), fused=fused)

    context = ParallelContext()
    context.device = torch.device("cuda", 0)
    context.set_seed(1)
    model, optimizer = made()
    _train(model, optimizer, 3)
    with CheckpointManager(tmp_path, context, background=background) as manager:
        manager.save(3, model, optimizer)
        _train(model, optimizer, 4)
    context.set_seed(2)
    again, other = made()
    with CheckpointManager(tmp_path, context) as manager:
        assert manager.load(again, other).random == "restored"
    _train(again, other, 4)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    on_cpu = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 1))
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        manager.load(on_cpu, torch.optim.AdamW(on_cpu.parameters()))
