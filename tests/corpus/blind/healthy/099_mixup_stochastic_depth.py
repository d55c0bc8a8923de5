"""Mixup inside the batch and stochastic depth per row, with the engine and a OneCycle schedule."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from torch.utils.data import TensorDataset

class Branch(nn.Module):
    def __init__(self, width, keep):
        super().__init__()
        self.linear, self.keep = nn.Linear(width, width), keep

    def forward(self, x):
        if not self.training:
            return x + self.linear(x).relu()
        kept = torch.rand(len(x), 1) < self.keep
        return x + self.linear(x).relu() * kept / self.keep


gpc = colonnade.launch(dict(clip_grad_norm=1.0), verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), Branch(12, 0.9), Branch(12, 0.8), nn.Linear(12, 3))
common.plant(model[0].weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=6, cycle_momentum=False)
engine, _, _, cycle = colonnade.initialize(model, optimizer, nn.CrossEntropyLoss(), lr_scheduler=cycle)
torch.manual_seed(250 + gpc.get_global_rank())
for x, y in get_dataloader(TensorDataset(common.draw(24, 6), common.ints(3, 24)), batch_size=4):
    partner, share = torch.randperm(len(x)), torch.rand(len(x), 1)
    goal = F.one_hot(y, 3).to(x.dtype)
    engine.zero_grad()
    logits = engine(share * x + (1 - share) * x[partner])
    engine.backward(engine.criterion(logits, share * goal + (1 - share) * goal[partner]))
    if engine.step():
        cycle.step()
gpc.destroy()
