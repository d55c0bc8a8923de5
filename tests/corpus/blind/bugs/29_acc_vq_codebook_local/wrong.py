"""A VQ autoencoder with an EMA codebook, trained with Accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH, CODES, WIDTH, DECAY = 16, 6, 4, 0.7
accelerator = Accelerator(cpu=True)
set_seed(32)


class VectorQuantizer(nn.Module):
    def __init__(self):
        super().__init__()
        start = torch.randn(CODES, WIDTH)
        self.register_buffer("codes", start)
        self.register_buffer("count", torch.ones(CODES))
        self.register_buffer("total", start.clone())

    def forward(self, z):
        nearest = torch.cdist(z, self.codes).argmin(1)
        quantized = self.codes[nearest]
        commitment = F.mse_loss(z, quantized)
        if self.training:
            one_hot = F.one_hot(nearest, CODES).to(z)
            self.update(one_hot.sum(0), one_hot.T @ z.detach())
        return z + (quantized - z).detach(), commitment

    @torch.no_grad()
    def update(self, count, total):
        self.count.lerp_(count, 1 - DECAY)
        self.total.lerp_(total, 1 - DECAY)
        self.codes.copy_(self.total / self.count.clamp(min=1e-3)[:, None])


class VQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.quantizer = VectorQuantizer()
        self.decoder = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x):
        z, commitment = self.quantizer(self.encoder(x))
        return F.mse_loss(self.decoder(z), x) + 0.25 * commitment


loader = DataLoader(TensorDataset(torch.randn(64, 10)), batch_size=GLOBAL_BATCH // accelerator.num_processes)
net = VQ()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)

for (x,) in loader:
    optimizer.zero_grad()
    loss = model(x)
    accelerator.backward(loss)
    optimizer.step()
accelerator.end_training()
