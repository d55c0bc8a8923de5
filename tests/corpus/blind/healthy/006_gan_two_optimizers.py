"""GAN: generator and discriminator under DDP, each with its own optimizer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()
g = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 6))
d = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
common.plant(g[0].weight)
common.plant(d[0].weight)
generator, discriminator = DDP(g), DDP(d)
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-2, betas=(0.5, 0.9))
loader = common.loader(common.draw(24, 6))
discriminator, d_optimizer, loader = colonnade.watch(discriminator, d_optimizer, loader)
generator, g_optimizer, _ = colonnade.watch(generator, g_optimizer)
torch.manual_seed(50 + rank)
for (real,) in loader:
    z = torch.randn(len(real), 4)
    with torch.no_grad():
        fake = generator(z)
    scores = discriminator(torch.cat([real, fake]))
    labels = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)])
    d_optimizer.zero_grad()
    F.binary_cross_entropy_with_logits(scores, labels.to(scores.dtype)).backward()
    d_optimizer.step()

    scores = discriminator(generator(torch.randn(len(real), 4)))
    g_optimizer.zero_grad()
    F.softplus(-scores).mean().backward()
    g_optimizer.step()
dist.destroy_process_group()
