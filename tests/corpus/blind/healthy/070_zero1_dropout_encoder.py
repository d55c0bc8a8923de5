"""ZeRO-1 with a transformer encoder with dropout; other samples on each rank."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from torch.utils.data import TensorDataset

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 2)

    def forward(self, tokens):
        return self.head(self.layers(self.words(tokens)).mean(1))


gpc = colonnade.launch(dict(zero=1, clip_grad_norm=1.0), verbose=False)
torch.manual_seed(0)
model = Encoder()
common.plant(model.words.weight)
engine, *_ = colonnade.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), nn.CrossEntropyLoss())
data = TensorDataset(common.ints(20, 24, 6), common.ints(2, 24, seed=3))
for tokens, y in get_dataloader(data, batch_size=4):
    engine.zero_grad()
    engine.backward(engine.criterion(engine(tokens), y))
    engine.step()
gpc.destroy()
