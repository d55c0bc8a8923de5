"""Weight normalization by a parametrization, under DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
from torch.nn.utils.parametrizations import weight_norm

rank, world = common.start()
net = nn.Sequential(weight_norm(nn.Linear(8, 16)), nn.ELU(), weight_norm(nn.Linear(16, 4)))
common.plant([p for p in net.parameters() if p.requires_grad][0])
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
loader = common.loader(common.draw(24, 8), common.draw(24, 4, seed=3))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.huber_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
dist.destroy_process_group()
