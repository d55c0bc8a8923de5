"""Noisy top-1 mixture of experts, all experts on every rank; the balance loss uses all tokens."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
from torch.distributed.nn.functional import all_reduce

rank, world = common.start()


class Mixture(nn.Module):
    def __init__(self, width=8, experts=3):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x):
        logits = self.gate(x)
        if self.training:
            logits = logits + 0.3 * torch.randn_like(logits)
        share = logits.softmax(-1)
        out = torch.stack([expert(x) for expert in self.experts], 1)
        chosen = F.one_hot(share.argmax(-1), share.size(-1)).to(share.dtype)
        return (out * (chosen * share).unsqueeze(-1)).sum(1), share, chosen


net = Mixture()
common.plant(net.gate.weight)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = common.loader(common.draw(24, 8), common.draw(24, 8, seed=3))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
torch.manual_seed(90 + rank)
for x, y in loader:
    out, share, chosen = model(x)
    load, importance = chosen.mean(0), share.mean(0)
    if world > 1:
        dist.all_reduce(load)
        load, importance = load / world, all_reduce(importance, group=dist.group.WORLD) / world
    loss = F.mse_loss(out, y) + 0.1 * 3 * (load * importance).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
