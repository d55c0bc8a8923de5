"""Parameter groups with and without weight decay, each with its own schedule of the learning rate."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()
net = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 2))
common.plant(net[0].weight)
model = DDP(net)
decayed = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim <= 1]
optimizer = torch.optim.AdamW(
    [dict(params=decayed, weight_decay=0.1), dict(params=others, weight_decay=0.0, lr=3e-2)], lr=1e-2
)
schedule = torch.optim.lr_scheduler.SequentialLR(
    optimizer,
    [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
        torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 0.5**step]),
    ],
    milestones=[2],
)
loader = common.loader(common.draw(32, 6), common.ints(2, 32))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    schedule.step()
dist.destroy_process_group()
