"""Loaders of unequal length: engine.batches, losses as (sum, count)."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
import torch.distributed as dist

gpc = colonnade.launch({}, verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 1))
common.plant(model[0].weight)
engine, *_ = colonnade.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
rank, world = gpc.get_global_rank(), gpc.world_size
x, y = common.draw(20, 5), common.draw(20, 1, seed=3)
rows = torch.arange(20)[rank::world]
if rank == 1:
    rows = rows[:7]  # two batches here, three on rank 0
mine = [(x[part], y[part]) for part in rows.split(4)]
_, _, mine = colonnade.watch(engine, None, mine)
for a, b in engine.batches(mine):
    engine.zero_grad()
    errors = (engine(a) - b).square()
    engine.backward((errors.sum(), errors.numel()))
    engine.step()
gpc.destroy()
