"""Sharpness-aware minimization: two passes; the ascent direction is the reduced gradient."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = common.loader(common.draw(24, 8), common.draw(24, 1, seed=3))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for x, y in loader:
    F.mse_loss(model(x), y).backward()  # DDP averages this gradient too
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
        moves = [0.05 * p.grad / (norm + 1e-12) for p in net.parameters()]
        for p, move in zip(net.parameters(), moves):
            p.add_(move)
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    with torch.no_grad():
        for p, move in zip(net.parameters(), moves):
            p.sub_(move)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
