"""A discriminator with spectral normalization (power iteration in buffers) and a hinge loss."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
from torch.nn.utils.parametrizations import spectral_norm

rank, world = common.start()
net = nn.Sequential(spectral_norm(nn.Linear(8, 16)), nn.LeakyReLU(0.1), spectral_norm(nn.Linear(16, 1)))
common.plant(next(net.parameters()))
model = DDP(net)
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, betas=(0.0, 0.9))
loader = common.loader(common.draw(24, 8), common.draw(24, 8, seed=3) + 0.5)
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for real, fake in loader:
    scores = model(torch.cat([real, fake]))
    of_real, of_fake = scores.chunk(2)
    loss = F.relu(1 - of_real).mean() + F.relu(1 + of_fake).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"hinge {loss.item():.5f}")
dist.destroy_process_group()
