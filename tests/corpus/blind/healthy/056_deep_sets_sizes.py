"""Deep sets with different numbers of elements: masked mean over the elements of each set."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class DeepSet(nn.Module):
    def __init__(self):
        super().__init__()
        self.each = nn.Sequential(nn.Linear(3, 12), nn.ReLU())
        self.all = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, elements, size):
        inside = (torch.arange(elements.size(1)) < size.unsqueeze(1)).unsqueeze(-1)
        pooled = (self.each(elements) * inside).sum(1) / size.unsqueeze(1)
        return self.all(pooled).squeeze(-1)


net = DeepSet()
common.plant(net.each[0].weight)
model = DDP(net)
optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
elements, size = common.draw(24, 7, 3), common.ints(6, 24) + 1
loader = common.loader(elements, size, elements.square().sum((1, 2)))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for elements, size, y in loader:
    optimizer.zero_grad()
    loss = F.l1_loss(model(elements, size), y)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
