"""Annealed Gaussian noise on the reduced gradients, from a generator with the same seed on all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = common.loader(common.draw(24, 6), common.ints(3, 24))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
shared = torch.Generator().manual_seed(11)
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    deviation = (0.01 / (1 + step) ** 0.55) ** 0.5
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=shared, dtype=parameter.dtype)
        parameter.grad.add_(noise, alpha=deviation)
    optimizer.step()
dist.destroy_process_group()
