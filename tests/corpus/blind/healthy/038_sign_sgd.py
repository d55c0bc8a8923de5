"""Sign descent (Lion without momentum): the sign is taken after the gradients are averaged."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class SignSGD(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
common.plant(net[0].weight)
optimizer = SignSGD(net.parameters(), lr=1e-2)
loader = common.loader(common.draw(24, 6), common.ints(3, 24))
net, optimizer, loader = colonnade.watch(net, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    common.average_gradients(net)
    optimizer.step()
dist.destroy_process_group()
