"""Siamese network: three forward passes of the same DDP model before one backward pass, triplet loss."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()
net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
anchor = common.draw(24, 6)
loader = common.loader(anchor, anchor + 0.2 * common.draw(24, 6, seed=3), common.draw(24, 6, seed=4))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for anchor, positive, negative in loader:
    a, p, n = (F.normalize(model(x), dim=1) for x in (anchor, positive, negative))
    near = (a - p).square().sum(1)
    far = (a - n).square().sum(1)
    loss = F.softplus(near - far + 0.2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"near {near.mean().item():.3f}, far {far.mean().item():.3f}")
dist.destroy_process_group()
