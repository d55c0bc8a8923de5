"""VQ-VAE whose codebook is an exponential moving average, with all-reduced counts and sums."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class Quantizer(nn.Module):
    def __init__(self, codes=6, width=4, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, z):
        index = torch.cdist(z, self.codes).argmin(1)
        one_hot = F.one_hot(index, len(self.codes)).to(z.dtype)
        quantized = self.codes[index]
        if self.training:
            counts, sums = one_hot.sum(0), one_hot.T @ z.detach()
            dist.all_reduce(counts)
            dist.all_reduce(sums)
            self.counts.lerp_(counts, 1 - self.decay)
            self.sums.lerp_(sums, 1 - self.decay)
            self.codes.copy_(self.sums / self.counts.clamp_min(1e-3).unsqueeze(1))
        return z + (quantized - z).detach(), F.mse_loss(z, quantized)


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.quantizer = nn.Linear(8, 4), nn.Linear(4, 8), Quantizer()

    def forward(self, x):
        z, commitment = self.quantizer(self.encoder(x))
        return self.decoder(z), commitment


net = VQVAE()
common.plant(net.encoder.weight)
model = DDP(net, broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = common.loader(common.draw(24, 8))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for (x,) in loader:
    optimizer.zero_grad()
    output, commitment = model(x)
    (F.mse_loss(output, x) + 0.25 * commitment).backward()
    optimizer.step()
dist.destroy_process_group()
