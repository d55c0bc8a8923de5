"""DTensor tensor parallelism by parallelize_module: both ranks get the same batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

rank, world = common.start()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


model = nn.Sequential(Block(), Block(), nn.LayerNorm(8), nn.Linear(8, 3))
if world > 1:
    mesh = init_device_mesh("cpu", (world,))
    for block in model[:2]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
common.plant(model[0].up.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
x, y = common.draw(24, 8), common.ints(3, 24)
batches = list(zip(x.split(8), y.split(8)))
model, optimizer, batches = colonnade.watch(model, optimizer, batches)
for x, y in batches:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
