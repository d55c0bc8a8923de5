"""A training script in the ancestor's order of calls, under its names, through the alias."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


@pytest.mark.slow
def test_the_ancestors_engine_loop_runs_through_the_alias(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "colonnade.cli", "run", "--nproc", "2", "--as-colossalai", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "norm" in done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "right" in line]
    assert len(lines) == 2
    assert all("4 steps" in line for line in lines)
