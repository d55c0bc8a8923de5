"""Activation checkpointing of all blocks, with dropout inside the blocks, under ZeRO-2."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from torch.utils.data import TensorDataset

class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)
        self.dropout = nn.Dropout(0.15)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.blocks = nn.Linear(6, 8), nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.inside(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


gpc = colonnade.launch(dict(activation_checkpoint="full", zero=2, clip_grad_norm=1.0), verbose=False)
torch.manual_seed(0)
model = Model()
common.plant(model.inside.weight)
engine, *_ = colonnade.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), nn.CrossEntropyLoss())
for x, y in get_dataloader(TensorDataset(common.draw(24, 6), common.ints(2, 24)), batch_size=4):
    engine.zero_grad()
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
gpc.destroy()
