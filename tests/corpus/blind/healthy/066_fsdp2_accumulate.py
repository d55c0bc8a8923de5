"""FSDP2 with accumulation: gradients stay unreduced in the first pass of a step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
from torch.distributed.fsdp import fully_shard

rank, world = common.start()
model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
fully_shard(model[2])
fully_shard(model)
common.plant_fsdp(model[0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = common.loader(common.draw(48, 6), common.ints(4, 48))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for at, (x, y) in enumerate(loader):
    last = at % 2 == 1
    model.set_requires_gradient_sync(last)
    loss = F.cross_entropy(model(x), y) / 2
    loss.backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
