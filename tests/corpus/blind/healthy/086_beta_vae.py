"""A beta-VAE with a warm-up of beta: noise inside the model, the loss as a criterion over a tuple."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from torch.utils.data import TensorDataset

class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 6), nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 8))

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(z), mean, log_variance


gpc = colonnade.launch(dict(clip_grad_norm=2.0), verbose=False)
torch.manual_seed(0)
model = VAE()
common.plant(model.encoder.weight)
engine, *_ = colonnade.initialize(model, torch.optim.Adam(model.parameters(), lr=1e-2))
torch.manual_seed(210 + gpc.get_global_rank())
for step, (x,) in enumerate(get_dataloader(TensorDataset(common.draw(24, 8)), batch_size=4)):
    engine.zero_grad()
    output, mean, log_variance = engine(x)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
    beta = min(1.0, (step + 1) / 3)
    engine.backward((F.mse_loss(output, x, reduction="none").sum(1) + beta * divergence).mean())
    engine.step()
gpc.destroy()
