"""Clipping per layer, with a group of its own for the head, and unequal learning rates."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from torch.utils.data import TensorDataset

clip = dict(max_norm=0.5, groups=dict(head=dict(params="4.*", max_norm=0.05)))
gpc = colonnade.launch(dict(clip_grad_norm=clip), verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
common.plant(model[0].weight)
groups = [dict(params=model[:4].parameters()), dict(params=model[4].parameters(), lr=0.5)]
optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
engine, *_ = colonnade.initialize(model, optimizer, nn.CrossEntropyLoss())
for x, y in get_dataloader(TensorDataset(5 * common.draw(24, 6), common.ints(3, 24)), batch_size=4):
    engine.zero_grad()
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    norms = {name: float(norm) for name, norm in engine.grad_norms().items()}
    print(sorted(norms.items()))
gpc.destroy()
