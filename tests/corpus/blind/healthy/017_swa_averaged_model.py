"""Stochastic weight averaging: AveragedModel from the second step on, with SWALR."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
from torch.optim.swa_utils import SWALR, AveragedModel

rank, world = common.start()
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
common.plant(net[0].weight)
model = DDP(net)
averaged = AveragedModel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
loader = common.loader(common.draw(24, 8), common.ints(2, 24))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    if step > 0:
        averaged.update_parameters(net)
        schedule.step()
if rank == 0:
    print("averaged", averaged(common.draw(2, 8)).detach().tolist())
dist.destroy_process_group()
