"""Variational autoencoder with the reparameterization trick, summed per sample, mean over samples."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 16), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(16, 3), nn.Linear(16, 3)
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x):
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(z), mean, log_variance


net = VAE()
common.plant(next(net.parameters()))
model = DDP(net)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = common.loader(torch.sigmoid(common.draw(24, 10)))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
torch.manual_seed(7 + rank)
for (x,) in loader:
    logits, mean, log_variance = model(x)
    reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)
    loss = (reconstruction + divergence).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
