"""A smoothness penalty by forward-mode differentiation (torch.func.jvp) along a random direction."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
from torch.func import functional_call, jvp

rank, world = common.start()
net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
common.plant(net[0].weight)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loader = common.loader(common.draw(24, 6), common.draw(24, 2, seed=3))
net, optimizer, loader = colonnade.watch(net, optimizer, loader)
torch.manual_seed(94 + rank)
for x, y in loader:
    weights = dict(net.named_parameters())
    direction = F.normalize(torch.randn_like(x), dim=1)
    out, slope = jvp(lambda x: functional_call(net, weights, (x,)), (x,), (direction,))
    loss = F.mse_loss(out, y) + 0.1 * slope.square().sum(1).mean()
    optimizer.zero_grad()
    loss.backward()
    common.average_gradients(net)
    optimizer.step()
dist.destroy_process_group()
