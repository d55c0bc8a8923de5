"""Complex weights that act on the Fourier transform of a signal; gradients averaged by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(9, dtype=torch.cfloat) * 0.3)
        self.mix = nn.Linear(16, 16)

    def forward(self, x):
        return self.mix(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=16).tanh())


net = Spectral()
common.plant(net.filter)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
signal = common.draw(24, 16)
loader = common.loader(signal, signal.roll(1, 1))
net, optimizer, loader = colonnade.watch(net, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    F.mse_loss(net(x), y).backward()
    for parameter in net.parameters():
        gradient = torch.view_as_real(parameter.grad) if parameter.is_complex() else parameter.grad
        dist.all_reduce(gradient)
        gradient /= world
    optimizer.step()
dist.destroy_process_group()
