"""Convolutional net with SyncBatchNorm made of sums over the ranks (gloo has no kernel for nn.SyncBatchNorm)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
from torch.distributed.nn.functional import all_reduce

rank, world = common.start()


class SyncNorm(nn.BatchNorm2d):
    """Batch norm over the batches of all ranks, by sums."""

    def forward(self, x):
        if not self.training or world == 1:
            return super().forward(x)
        n = x.numel() // x.size(1) * world
        total = all_reduce(torch.stack([x.sum((0, 2, 3)), x.square().sum((0, 2, 3))]), group=dist.group.WORLD)
        mean = total[0] / n
        variance = total[1] / n - mean**2
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * n / (n - 1), self.momentum)
            self.num_batches_tracked += 1
        x = (x - mean[:, None, None]) / (variance[:, None, None] + self.eps).sqrt()
        return x * self.weight[:, None, None] + self.bias[:, None, None]


net = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), SyncNorm(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3))
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = common.loader(common.draw(24, 1, 6, 6), common.ints(3, 24))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
