"""Masked language model, masked in the loop (80/10/10 rule); divided by the masked tokens of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 16)

    def forward(self, x):
        return self.head(self.layer(self.words(x)))


net = Encoder()
common.plant(next(net.parameters()))
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = common.loader(common.ints(15, 24, 7))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
torch.manual_seed(41 + rank)
for (tokens,) in loader:
    draw = torch.rand(tokens.shape)
    chosen, how = draw < 0.3, torch.rand(tokens.shape)
    x = torch.where(chosen & (how < 0.8), torch.full_like(tokens, 15), tokens)
    x = torch.where(chosen & (how > 0.9), torch.randint(0, 15, tokens.shape), x)
    losses = F.cross_entropy(model(x).transpose(1, 2), tokens, reduction="none") * chosen
    count = chosen.sum()
    dist.all_reduce(count)
    optimizer.zero_grad()
    (losses.sum() * world / count.clamp_min(1)).backward()
    optimizer.step()
dist.destroy_process_group()
