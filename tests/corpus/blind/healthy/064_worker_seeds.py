"""A loader with a worker process that augments with its own seed (worker_init_fn and a generator)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
import numpy as np
from torch.utils.data import Dataset

rank, world = common.start()


class Jittered(Dataset):
    def __init__(self):
        self.x, self.y = common.draw(24, 6), common.draw(24, 2, seed=3)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, at):
        return self.x[at] + 0.1 * torch.randn(6), self.y[at] * (1 + 0.01 * float(np.random.rand()))


def seed_worker(worker):
    np.random.seed((torch.initial_seed() + worker) % 2**32)


net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(9 + rank)
loader = common.loader(Jittered(), num_workers=1, worker_init_fn=seed_worker, generator=generator)
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
