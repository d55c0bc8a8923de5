"""Augmentation by numpy in the dataset (crops and flips), with a seed of its own for each rank."""

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


class Crops(Dataset):
    def __init__(self):
        self.images, self.labels = common.draw(24, 1, 8, 8), common.ints(3, 24)

    def __len__(self):
        return 24

    def __getitem__(self, at):
        top, left = np.random.randint(0, 3, size=2)
        image = self.images[at, :, top : top + 6, left : left + 6]
        if np.random.rand() < 0.5:
            image = image.flip(-1)
        return image + 0.01 * float(np.random.randn()), self.labels[at]


net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = common.loader(Crops())
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
np.random.seed(1000 + rank)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
