"""A step in which a sample gives NaN is skipped on all ranks: the norm is computed after the reduction."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x = common.draw(32, 6)
x[13] = float("nan")  # in the second step, on one rank
loader = common.loader(x, common.draw(32, 1, seed=3))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
skipped = 0
for x, y in loader:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    if torch.isfinite(norm):
        optimizer.step()
    else:
        skipped += 1
print(f"rank {rank}: {skipped} step(s) skipped")
dist.destroy_process_group()
