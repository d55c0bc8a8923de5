"""Gradual unfreezing: the head first, the body from the second step; gradients averaged by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2))
body, head = net[:4], net[4]
body.requires_grad_(False)
common.plant(head.weight)  # the first parameter that is trained in every step
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
loader = common.loader(common.draw(24, 6), common.ints(2, 24))
net, optimizer, loader = colonnade.watch(net, optimizer, loader)
for step, (x, y) in enumerate(loader):
    if step == 1:
        body.requires_grad_(True)
    optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    common.average_gradients(net)
    torch.nn.utils.clip_grad_norm_([p for p in net.parameters() if p.grad is not None], 1.0)
    optimizer.step()
dist.destroy_process_group()
