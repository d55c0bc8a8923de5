"""Clipping by value after the reduction, then RMSprop; a recurrent cell unrolled by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(3, 8), nn.Linear(8, 1)

    def forward(self, x):
        h = c = x.new_zeros(len(x), 8)
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
        return self.head(h)


net = Cell()
common.plant(net.cell.weight_ih)
model = DDP(net)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2, centered=True)
loader = common.loader(common.draw(24, 5, 3), 3 * common.draw(24, 1, seed=3))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    loss = (model(x) - y).square().sum(1).mean()
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
    optimizer.step()
dist.destroy_process_group()
