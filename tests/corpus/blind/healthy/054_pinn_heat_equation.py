"""A physics-informed network for the heat equation: derivatives with respect to the inputs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, points):
        return self.layers(points)


net = Field()
common.plant(net.layers[0].weight)
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
points = torch.rand(32, 2, generator=torch.Generator().manual_seed(4))
edge = points.clone()
edge[:, 1] = 0.0
loader = common.loader(points, edge)
net, optimizer, loader = colonnade.watch(net, optimizer, loader)
for inside, start in loader:
    inside = inside.clone().requires_grad_()
    u = net(inside)
    (first,) = torch.autograd.grad(u.sum(), inside, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), inside, create_graph=True)
    residual = first[:, 1] - 0.1 * second[:, 0]
    initial = net(start).squeeze(1) - torch.sin(torch.pi * start[:, 0])
    loss = residual.square().mean() + 10 * initial.square().mean()
    optimizer.zero_grad()
    loss.backward()
    common.average_gradients(net)
    optimizer.step()
dist.destroy_process_group()
