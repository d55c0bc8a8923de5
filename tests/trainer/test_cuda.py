"""On a GPU: the log of a run, with the time of its steps by phase, costs no wait of the host."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import colonnade
from colonnade.context.parallel_context import ParallelContext
from colonnade.trainer import BaseHook, Trainer
from colonnade.trainer.hooks import GradientNormHook, JsonlHook, LossHook

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class NoWaits(BaseHook):
    """From the fifth step to the fifteenth a wait for the device is an error."""

    def after_train_iter(self, trainer, output, label, loss):
        torch.cuda.set_sync_debug_mode("error" if 5 <= trainer.cur_step < 15 else "default")

    def close(self):
        torch.cuda.set_sync_debug_mode("default")


def test_phases_are_measured_and_no_steady_step_waits(tmp_path):
    with colonnade.launch({"clip_grad_norm": 1.0}, context=ParallelContext(), verbose=False) as gpc:
        model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).to(gpc.device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine, *_ = colonnade.initialize(model, optimizer, nn.MSELoss(), context=gpc)
        batches = [(torch.randn(4096, 512, device=gpc.device),) * 2 for _ in range(20)]
        log = tmp_path / "log.jsonl"
        Trainer(engine).fit(batches, epochs=1, hooks=[NoWaits(1000), LossHook(), GradientNormHook(), JsonlHook(log)])
    steps = [line for line in map(json.loads, log.read_text().splitlines()) if line["kind"] == "step"]
    for line in steps[5:15]:
        times = {name: value for name, value in line.items() if name.startswith("time/")}
        assert min(times["time/forward"], times["time/backward"], times["time/optimizer"]) > 0
        assert sum(times.values()) == pytest.approx(line["seconds"], rel=0.5)
    assert steps[0]["memory"] > 50
