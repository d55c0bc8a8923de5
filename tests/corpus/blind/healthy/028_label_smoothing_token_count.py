"""Label smoothing with ignore_index; the sum is divided by the tokens of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()
net = nn.Sequential(nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 12))
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
x, y = common.ints(12, 24, 8), common.ints(12, 24, 8, seed=3)
lengths = common.ints(6, 24, seed=4) + 2
y = y.masked_fill(torch.arange(8) >= lengths.unsqueeze(1), -100)
loader = common.loader(x, y)
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for x, y in loader:
    tokens = (y != -100).sum()
    dist.all_reduce(tokens)
    loss = F.cross_entropy(
        model(x).flatten(0, 1), y.flatten(), ignore_index=-100, label_smoothing=0.1, reduction="sum"
    )
    loss = loss * world / tokens  # DDP divides by world
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
dist.destroy_process_group()
