"""Stochastic depth: each row of the batch drops each residual block on its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class Dropped(nn.Module):
    def __init__(self, width, keep):
        super().__init__()
        self.norm, self.linear, self.keep = nn.LayerNorm(width), nn.Linear(width, width), keep

    def forward(self, x):
        branch = self.linear(F.gelu(self.norm(x)))
        if not self.training:
            return x + branch
        kept = torch.empty(len(x), 1, dtype=x.dtype).bernoulli_(self.keep)
        return x + branch * kept / self.keep


net = nn.Sequential(nn.Linear(6, 8), *[Dropped(8, 1 - 0.15 * i) for i in range(1, 4)], nn.Linear(8, 1))
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = common.loader(common.draw(24, 6), common.draw(24, 1, seed=3))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
torch.manual_seed(91 + rank)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
