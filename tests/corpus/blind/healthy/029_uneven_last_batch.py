"""Ranks with batches of different sizes; each mean is weighted by the rows of its rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()
net = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 2))
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
x, y = common.draw(22, 7), common.ints(2, 22)
# the last batch of rank 0 has four rows, that of rank 1 two
cuts = [0, 8, 16, 22]
batches = []
for begin, end in zip(cuts, cuts[1:]):
    rows = torch.arange(begin, end)
    mine = rows.split(4)[rank] if world > 1 else rows
    batches.append((x[mine], y[mine]))
model, optimizer, batches = colonnade.watch(model, optimizer, batches)
for x, y in batches:
    rows = torch.tensor(len(x))
    dist.all_reduce(rows)
    loss = F.cross_entropy(model(x), y) * len(x) * world / rows
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print("rows of the step", int(rows))
dist.destroy_process_group()
