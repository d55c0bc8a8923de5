"""Quantization-aware training: weights rounded by a straight-through estimator, activations stochastically."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


def rounded(weight, levels=15):
    scale = weight.detach().abs().max() / levels
    return weight + ((weight / scale).round() * scale - weight).detach()


def stochastically(x, step=0.05):
    down = (x / step).floor()
    up = torch.rand_like(x) < x / step - down
    return x + ((down + up) * step - x).detach()


class Quantized(nn.Linear):
    def forward(self, x):
        return F.linear(stochastically(x), rounded(self.weight), self.bias)


net = nn.Sequential(Quantized(6, 12), nn.ReLU(), Quantized(12, 3))
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = common.loader(common.draw(24, 6), common.ints(3, 24))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
torch.manual_seed(92 + rank)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
