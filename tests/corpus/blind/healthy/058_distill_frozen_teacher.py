"""Distillation from a larger frozen teacher: soft targets with a temperature, plus hidden features."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, width), nn.GELU()), nn.Linear(width, 4)

    def forward(self, x):
        h = self.body(x)
        return h, self.head(h)


teacher = Net(24).eval().requires_grad_(False)


class Student(Net):
    def __init__(self):
        super().__init__(8)
        self.project = nn.Linear(8, 24, bias=False)

    def forward(self, x):
        h, logits = super().forward(x)
        return self.project(h), logits


net = Student()
common.plant(net.body[0].weight)
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = common.loader(common.draw(24, 6), common.ints(4, 24))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for x, y in loader:
    with torch.no_grad():
        goal_h, goal = teacher(x)
    h, logits = model(x)
    soft = F.kl_div((logits / 2).log_softmax(-1), (goal / 2).log_softmax(-1), reduction="batchmean", log_target=True)
    loss = 4 * soft + F.mse_loss(h, goal_h) + 0.5 * F.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
