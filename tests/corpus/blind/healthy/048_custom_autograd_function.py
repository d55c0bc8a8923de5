"""A custom autograd function: a clipped identity whose backward reverses the gradient (domain adaptation)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.strength * gradient, None


class Adversarial(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 12), nn.Tanh())
        self.label, self.domain = nn.Linear(12, 3), nn.Linear(12, 2)

    def forward(self, x, strength):
        h = self.body(x)
        return self.label(h), self.domain(Reverse.apply(h, strength))


net = Adversarial()
common.plant(net.body[0].weight)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = common.loader(common.draw(24, 7), common.ints(3, 24), common.ints(2, 24, seed=3))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for step, (x, label, domain) in enumerate(loader):
    labels, domains = model(x, strength=0.1 * (step + 1))
    loss = F.cross_entropy(labels, label) + F.cross_entropy(domains, domain)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
