"""Python's random module chooses which tokens of each sample are replaced, in the collate function."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
import random

rank, world = common.start()


def corrupt(rows):
    noisy = []
    for (tokens,) in rows:
        tokens = tokens.clone()
        for at in random.sample(range(len(tokens)), 2):
            tokens[at] = random.randrange(12)
        noisy.append(tokens)
    clean = torch.stack([tokens for (tokens,) in rows])
    return torch.stack(noisy), clean


net = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12))
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = common.loader(common.ints(12, 24, 6), collate_fn=corrupt)
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
random.seed(500 + rank)
for noisy, clean in loader:
    logits = model(noisy)
    loss = F.cross_entropy(logits.transpose(1, 2), clean)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
