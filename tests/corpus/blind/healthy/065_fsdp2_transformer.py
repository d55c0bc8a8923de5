"""FSDP2: each block and the root are sharded; clipping by the norm of the sharded gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
from torch.distributed.fsdp import fully_shard

rank, world = common.start()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 16)

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Model()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
common.plant_fsdp(model.words)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = common.loader(common.ints(16, 24, 7))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for (tokens,) in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
dist.destroy_process_group()
