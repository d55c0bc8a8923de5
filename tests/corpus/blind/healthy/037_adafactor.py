"""Adafactor from torch, with relative steps, after DDP's reduction; z-loss on the logits."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()
net = nn.Sequential(nn.Embedding(14, 8), nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 14))
common.plant(net[0].weight)
model = DDP(net, gradient_as_bucket_view=True)
optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)
loader = common.loader(common.ints(14, 24, 6))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for (tokens,) in loader:
    logits = model(tokens[:, :-1])
    z = logits.logsumexp(-1)
    loss = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:]) + 1e-2 * z.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"loss {loss.item():.4f}, z {z.mean().item():.4f}")
dist.destroy_process_group()
