"""Mixup with a random partner of the same rank and a random share for each row."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
loader = common.loader(common.draw(24, 8), common.ints(3, 24))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
torch.manual_seed(60 + rank)
for x, y in loader:
    partner = torch.randperm(len(x))
    share = torch.rand(len(x), 1)
    mixed = share * x + (1 - share) * x[partner]
    log_p = model(mixed).log_softmax(-1)
    kept, other = F.nll_loss(log_p, y, reduction="none"), F.nll_loss(log_p, y[partner], reduction="none")
    loss = (share.squeeze(1) * kept + (1 - share.squeeze(1)) * other).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
