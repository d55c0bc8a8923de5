"""ZeRO-3: parameters sharded by FSDP2, residual blocks, mean absolute error with a custom criterion."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from torch.utils.data import TensorDataset

class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + F.silu(self.linear(self.norm(x)))


class MeanAbsolute(nn.Module):
    def forward(self, output, goal):
        return (output - goal).abs().mean()


gpc = colonnade.launch(dict(zero=3, clip_grad_norm=1.0), verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), Residual(12), Residual(12), nn.Linear(12, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = colonnade.initialize(model, optimizer, MeanAbsolute())
common.plant_fsdp(model[0])
for x, y in get_dataloader(TensorDataset(common.draw(24, 6), common.draw(24, 2, seed=3)), batch_size=4):
    engine.zero_grad()
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
engine.close()
gpc.destroy()
