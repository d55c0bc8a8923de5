"""Denoising diffusion (DDPM) with random timesteps and noise, under DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class Denoiser(nn.Module):
    def __init__(self, width=6, steps=20):
        super().__init__()
        self.time = nn.Embedding(steps, 16)
        self.inside, self.out = nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x, t):
        return self.out(F.silu(self.inside(x) + self.time(t)))


net = Denoiser()
common.plant(next(net.parameters()))
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
betas = torch.linspace(1e-3, 0.2, 20)
alphas = torch.cumprod(1 - betas, 0)
loader = common.loader(common.draw(24, 6))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
torch.manual_seed(100 + rank)
for (x,) in loader:
    t = torch.randint(0, 20, (len(x),))
    noise = torch.randn_like(x)
    a = alphas[t].to(x.dtype).unsqueeze(1)
    noisy = a.sqrt() * x + (1 - a).sqrt() * noise
    loss = F.mse_loss(model(noisy, t), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
