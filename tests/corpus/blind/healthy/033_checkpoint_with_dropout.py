"""Gradient checkpointing of blocks with dropout (the random state is kept for the recomputation)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
from torch.utils.checkpoint import checkpoint

rank, world = common.start()


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, 12)) for _ in range(3)
        )
        self.head = nn.Linear(12, 2)

    def forward(self, x):
        x = self.inside(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


net = Deep()
common.plant(net.inside.weight)
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = common.loader(common.draw(24, 6), common.ints(2, 24))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
torch.manual_seed(93 + rank)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
