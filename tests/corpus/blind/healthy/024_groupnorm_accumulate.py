"""GroupNorm net with two micro-batches per step: no_sync for the first, the loss halved."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
from contextlib import nullcontext

rank, world = common.start()
net = nn.Sequential(nn.Conv1d(2, 8, 3), nn.GroupNorm(4, 8), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 6, 2))
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = common.loader(common.draw(32, 2, 8), common.ints(2, 32))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for at, (x, y) in enumerate(loader):
    last = at % 2 == 1
    with nullcontext() if last else model.no_sync():
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
    if last:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
