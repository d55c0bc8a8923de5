"""Masked language model, masked in the collate function; divided by the masked tokens of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


def collate(rows):
    tokens = torch.stack([row for (row,) in rows])
    chosen = torch.rand(tokens.shape) < 0.3
    chosen[:, 0] = True
    return tokens.masked_fill(chosen, 15), tokens.masked_fill(~chosen, -100)


net = nn.Sequential(nn.Embedding(16, 12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 15))
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = common.loader(common.ints(15, 24, 7), collate_fn=collate)
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
torch.manual_seed(40 + rank)
for x, y in loader:
    count = (y != -100).sum()
    dist.all_reduce(count)
    logits = model(x)
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") * world / count
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
