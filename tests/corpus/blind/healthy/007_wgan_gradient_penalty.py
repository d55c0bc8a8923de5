"""WGAN critic with a gradient penalty on interpolated samples; gradients averaged by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()
critic = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
common.plant(critic[0].weight)
optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-2)
loader = common.loader(common.draw(24, 5), common.draw(24, 5, seed=9) + 1)
critic, optimizer, loader = colonnade.watch(critic, optimizer, loader)
torch.manual_seed(20 + rank)
for real, fake in loader:
    share = torch.rand(len(real), 1)
    mixed = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    optimizer.zero_grad()
    loss.backward()
    common.average_gradients(critic)
    optimizer.step()
dist.destroy_process_group()
