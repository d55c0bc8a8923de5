"""LBFGS with a closure that averages loss and gradients over the ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
common.plant(net[0].weight)
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4, history_size=4)
loader = common.loader(common.draw(24, 6), common.draw(24, 1, seed=3))
net, optimizer, loader = colonnade.watch(net, optimizer, loader)
for x, y in loader:

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        common.average_gradients(net)
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss / world

    first = optimizer.step(closure)
    if rank == 0:
        print("loss before the step", float(first))
dist.destroy_process_group()
