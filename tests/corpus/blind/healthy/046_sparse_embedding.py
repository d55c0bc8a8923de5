"""Sparse gradients of an embedding with SparseAdam; dense parameters with their own optimizer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30, 6, sparse=True)
        self.head = nn.Linear(6, 2)

    def forward(self, tokens):
        return self.head(self.words(tokens).mean(1))


net = Bags()
common.plant(net.words.weight)
model = DDP(net)
sparse = torch.optim.SparseAdam([net.words.weight], lr=1e-2)
dense = torch.optim.AdamW(net.head.parameters(), lr=1e-2)
loader = common.loader(common.ints(30, 24, 5), common.ints(2, 24, seed=3))
model, sparse, loader = colonnade.watch(model, sparse, loader)
_, dense, _ = colonnade.watch(model, dense)
for tokens, y in loader:
    sparse.zero_grad()
    dense.zero_grad()
    loss = F.cross_entropy(model(tokens), y)
    loss.backward()
    sparse.step()
    dense.step()
dist.destroy_process_group()
