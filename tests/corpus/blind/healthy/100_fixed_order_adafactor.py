"""Reductions in rank order with tiny buckets, Adafactor, tied embedding and head."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from torch.utils.data import TensorDataset

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(14, 8), nn.RMSNorm(8)
        self.gate, self.up, self.down = (nn.Linear(8, 16, bias=False), nn.Linear(8, 16), nn.Linear(16, 8))
        self.head = nn.Linear(8, 14, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens)
        h = self.norm(x)
        return self.head(x + self.down(F.silu(self.gate(h)) * self.up(h))).transpose(1, 2)


gpc = colonnade.launch(dict(sync=dict(fixed_order=True, bucket_mb=0.001), clip_grad_norm=1.0), verbose=False)
torch.manual_seed(0)
model = Model()
common.plant(model.words.weight)
engine, *_ = colonnade.initialize(model, torch.optim.Adafactor(model.parameters(), lr=0.05), nn.CrossEntropyLoss())
tokens = common.ints(14, 24, 7)
for x, y in get_dataloader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4):
    engine.zero_grad()
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
gpc.destroy()
