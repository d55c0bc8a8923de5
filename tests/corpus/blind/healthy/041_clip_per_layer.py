"""Every layer is clipped by its own norm, to a share of the norm of its weights (as LARS does)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
loader = common.loader(4 * common.draw(24, 6), common.ints(3, 24))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for layer in (net[0], net[2], net[4]):
        with torch.no_grad():
            limit = 0.05 * torch.stack([p.norm() for p in layer.parameters()]).norm().item()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), limit)
    optimizer.step()
dist.destroy_process_group()
