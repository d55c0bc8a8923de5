"""InfoNCE contrastive loss over the features of all ranks, gathered with gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
from torch.distributed.nn.functional import all_gather

rank, world = common.start()
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
first = common.draw(24, 8)
loader = common.loader(first, first + 0.1 * common.draw(24, 8, seed=3))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for a, b in loader:
    optimizer.zero_grad()
    features = F.normalize(model(torch.cat([a, b])), dim=1)
    anchors, positives = features.chunk(2)
    candidates = torch.cat(all_gather(positives.contiguous(), dist.group.WORLD)) if world > 1 else positives
    logits = anchors @ candidates.T / 0.2
    labels = torch.arange(len(a)) + rank * len(a)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
