"""Velocity-prediction diffusion (flow matching) with random times, and an EMA of the weights by hand."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
import copy
from torch.utils.data import TensorDataset

class Velocity(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.time, self.out = nn.Linear(4, 16), nn.Linear(1, 16), nn.Linear(16, 4)

    def forward(self, x, t):
        return self.out(F.silu(self.inside(x) + self.time(t)))


gpc = colonnade.launch(dict(zero=1, clip_grad_norm=1.0), verbose=False)
torch.manual_seed(0)
model = Velocity()
common.plant(model.inside.weight)
average = copy.deepcopy(model).requires_grad_(False)
engine, *_ = colonnade.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
torch.manual_seed(220 + gpc.get_global_rank())
for (x,) in get_dataloader(TensorDataset(common.draw(24, 4)), batch_size=4):
    noise, t = torch.randn_like(x), torch.rand(len(x), 1)
    engine.zero_grad()
    engine.backward(F.mse_loss(engine((1 - t) * noise + t * x, t), x - noise))
    engine.step()
    with torch.no_grad():
        for slow, fast in zip(average.parameters(), model.parameters()):
            slow.lerp_(fast, 0.05)
gpc.destroy()
