"""A training script in the ancestor's order of calls, under its names, through the alias."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.cli import colonnade

CONFIG = "BATCH_SIZE = 8\nNUM_EPOCHS = 1\nclip_grad_norm = 1.0\n"
SCRIPT = """
import colossalai
import torch
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import CosineAnnealingLR
from colossalai.utils import get_dataloader

colossalai.launch_from_torch(config="./config.py")
logger = get_dist_logger()
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
points = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
train = torch.utils.data.TensorDataset(points, points[:, :3].argmax(dim=1))
train_dataloader = get_dataloader(dataset=train, shuffle=True, batch_size=gpc.config.BATCH_SIZE, num_workers=0, pin_memory=True)
test_dataloader = get_dataloader(dataset=train, add_sampler=False, batch_size=gpc.config.BATCH_SIZE)
criterion = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
lr_scheduler = CosineAnnealingLR(optimizer, total_steps=gpc.config.NUM_EPOCHS * len(train_dataloader))
engine, train_dataloader, test_dataloader, _ = colossalai.initialize(model, optimizer, criterion, train_dataloader, test_dataloader)
for epoch in range(gpc.config.NUM_EPOCHS):
    engine.train()
    for img, label in train_dataloader:
        engine.zero_grad()
        output = engine(img)
        train_loss = engine.criterion(output, label)
        engine.backward(train_loss)
        engine.step()
        lr_scheduler.step()
    logger.info(f"loss {train_loss.item():.3f} norm {engine.grad_norm.item():.3f}")
engine.eval()
with torch.no_grad():
    right = sum((engine(img).argmax(dim=1) == label).sum().item() for img, label in test_dataloader)
print(f"rank {gpc.get_global_rank()}: {right} of {len(train)} right, {len(train_dataloader)} steps", flush=True)
gpc.destroy()
"""


TRAINER_CONFIG = """
from colossalai.amp import AMP_TYPE

BATCH_SIZE = 8
NUM_EPOCHS = 3
clip_grad_norm = 1.0
fp16 = dict(mode=AMP_TYPE.TORCH, init_scale=8.0)
"""
TRAINER_SCRIPT = """
import colossalai
import torch
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn import Accuracy
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.trainer import Trainer, hooks
from colossalai.utils import MultiTimer, get_dataloader

colossalai.launch_from_torch(config="./config.py")
logger = get_dist_logger()
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
points = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
train = torch.utils.data.TensorDataset(points, points[:, :3].argmax(dim=1))
train_dataloader = get_dataloader(dataset=train, shuffle=True, batch_size=gpc.config.BATCH_SIZE)
test_dataloader = get_dataloader(dataset=train, add_sampler=False, batch_size=gpc.config.BATCH_SIZE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
lr_scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=gpc.config.NUM_EPOCHS, warmup_steps=1)
engine, train_dataloader, test_dataloader, lr_scheduler = colossalai.initialize(
    model, optimizer, torch.nn.CrossEntropyLoss(), train_dataloader, test_dataloader, lr_scheduler)
trainer = Trainer(engine=engine, timer=MultiTimer(), logger=logger)
hook_list = [
    hooks.LossHook(),
    hooks.LRSchedulerHook(lr_scheduler=lr_scheduler, by_epoch=True),
    hooks.AccuracyHook(accuracy_func=Accuracy()),
    hooks.LogMetricByEpochHook(logger),
]
trainer.fit(train_dataloader=train_dataloader, epochs=gpc.config.NUM_EPOCHS, test_dataloader=test_dataloader,
            test_interval=1, hooks=hook_list, display_progress=True)
accuracy = trainer.states["metrics"]["test"]["Accuracy"].get_accumulated_value()
print(f"rank {gpc.get_global_rank()}: accuracy {accuracy:.3f} after {trainer.cur_step} steps", flush=True)
gpc.destroy()
"""


def run_as_colossalai(folder: Path, config: str, script: str) -> subprocess.CompletedProcess[str]:
    (folder / "config.py").write_text(config)
    (folder / "train.py").write_text(script)
    done = colonnade("run", "--nproc", 2, "--as-colossalai", "train.py", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_the_ancestors_trainer_flow_runs_through_the_alias(tmp_path):
    done = run_as_colossalai(tmp_path, TRAINER_CONFIG, TRAINER_SCRIPT)
    found = [re.search(r"accuracy (\S+) after (\d+) steps", line) for line in done.stdout.splitlines()]
    shown = [match.groups() for match in found if match]
    assert len(shown) == 2
    assert shown[0] == shown[1]
    assert float(shown[0][0]) > 0.6
    assert shown[0][1] == "12"
    assert "Accuracy" in done.stdout + done.stderr  # logged by epoch


@pytest.mark.slow
def test_the_ancestors_engine_loop_runs_through_the_alias(tmp_path):
    done = run_as_colossalai(tmp_path, CONFIG, SCRIPT)
    assert "norm" in done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "right" in line]
    assert len(lines) == 2
    assert all("4 steps" in line for line in lines)
