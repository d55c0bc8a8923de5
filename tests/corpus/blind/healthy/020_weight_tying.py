"""A small language model whose head is tied to its embedding, under DDP, with warm-up."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(13, 8)
        self.mix = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens)
        return self.head(x + self.mix(x))


net = Model()
common.plant(net.words.weight)
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
loader = common.loader(common.ints(13, 24, 9))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for (tokens,) in loader:
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    warm.step()
dist.destroy_process_group()
