"""An evaluation pass after every step, in eval mode, with running statistics that all ranks share."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class RunningScale(nn.Module):
    """Divides by a running root mean square, which every rank updates from the batches of all ranks."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("square", torch.ones(width))

    def forward(self, x):
        if self.training:
            now = x.detach().square().mean(0)
            dist.all_reduce(now)
            self.square.lerp_(now / world, 0.1)
        return x / (self.square + 1e-5).sqrt()


net = nn.Sequential(nn.Linear(6, 12), RunningScale(12), nn.ReLU(), nn.Linear(12, 3))
common.plant(net[0].weight)
model = DDP(net, broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = common.loader(common.draw(24, 6), common.ints(3, 24))
held_x, held_y = common.draw(8, 6, seed=8), common.ints(3, 8, seed=9)
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for step, (x, y) in enumerate(loader):
    model.train()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = (net(held_x.to(net[0].weight.dtype)).argmax(1) == held_y).double().mean()
    if rank == 0:
        print(f"step {step}: held-out accuracy {accuracy:.2f}")
dist.destroy_process_group()
