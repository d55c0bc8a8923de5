"""The number of accumulated batches grows from step to step; the loss is divided by the current number."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
from contextlib import nullcontext

rank, world = common.start()
net = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 1))
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)
loader = common.loader(common.draw(48, 5), common.draw(48, 1, seed=3))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
step, done = 0, 0
for x, y in loader:
    wanted = step + 1  # one batch in the first step, two in the second, ...
    last = done + 1 == wanted
    with nullcontext() if last else model.no_sync():
        (F.mse_loss(model(x), y) / wanted).backward()
    done += 1
    if last:
        optimizer.step()
        optimizer.zero_grad()
        step, done = step + 1, 0
dist.destroy_process_group()
