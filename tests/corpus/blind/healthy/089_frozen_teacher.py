"""Distillation with an engine: a frozen teacher outside of it, soft targets, a mean loss."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from torch.utils.data import TensorDataset

gpc = colonnade.launch(dict(clip_grad_norm=1.0, gradient_accumulation=2), verbose=False)
torch.manual_seed(5)
teacher = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 4)).eval().requires_grad_(False)
student = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
common.plant(student[0].weight)
engine, *_ = colonnade.initialize(student, torch.optim.AdamW(student.parameters(), lr=1e-2))
for epoch in range(2):
    loader = get_dataloader(TensorDataset(common.draw(32, 6)), batch_size=4, shuffle=True)
    loader.sampler.set_epoch(epoch)
    for (x,) in loader:
        with torch.no_grad():
            goal = (teacher(x.to(teacher[0].weight.dtype)) / 2).log_softmax(-1)
        log_p = (engine(x) / 2).log_softmax(-1)
        loss = 4 * F.kl_div(log_p, goal, reduction="batchmean", log_target=True)
        engine.zero_grad()
        engine.backward(loss)
        engine.step()
model = student
gpc.destroy()
