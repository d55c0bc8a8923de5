"""Checkpoints of a model on a GPU; nothing here runs without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colonnade._launch import launch
from colonnade.checkpoint import CheckpointManager
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize

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


def _weights(folder: Path, zero: Any, steps: int, resume: bool) -> list[torch.Tensor]:
    """After so many steps, from the checkpoint or saved at their end."""
    with launch({"zero": zero, "bf16": True}, context=ParallelContext(), verbose=False) as gpc:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        engine = initialize(model, lambda p: torch.optim.AdamW(p, lr=0.01), verbose=False, context=gpc)[0]
        with CheckpointManager(folder, gpc) as manager:
            if resume:
                manager.load(engine.model, engine.optimizer)
            for step in range(steps):
                engine.zero_grad()
                engine.backward(engine(torch.full((4, 16), 0.1 + step, device="cuda")).float().square().mean())
                engine.step()
            if not resume:
                manager.save(steps, engine.model, engine.optimizer)
        weights = [parameter.detach().cpu() for parameter in model.parameters()]
        engine.close()
        return weights


def test_state_on_the_host_is_saved_and_resumed(tmp_path):
    """Saved from the host and resumed on the device, and the other way round."""
    aside = {"stage": 2, "offload": True}
    for name, first, then in (("out", aside, 0), ("in", 0, aside), ("same", aside, aside)):
        _weights(tmp_path / name, first, 2, False)
        resumed = _weights(tmp_path / name, then, 3, True)
        stayed = _weights(tmp_path / name, first, 3, True)
        for one, two in zip(resumed, stayed, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
