"""ZeRO-2 with two accumulated batches per step; Adagrad; a language model with padding."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from torch.utils.data import TensorDataset

gpc = colonnade.launch(dict(zero=2, gradient_accumulation=2, clip_grad_norm=0.5), verbose=False)
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(15, 8), nn.Linear(8, 8), nn.Linear(8, 15)

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.words(tokens)))).flatten(0, 1)


model = Model()
common.plant(model.words.weight)
engine, *_ = colonnade.initialize(model, torch.optim.Adagrad(model.parameters(), lr=0.05), nn.CrossEntropyLoss())
tokens = common.ints(15, 48, 7)
labels = tokens.roll(-1, 1).masked_fill(torch.arange(7) > common.ints(5, 48, 1, seed=3) + 1, -100)
for x, y in get_dataloader(TensorDataset(tokens, labels), batch_size=4):
    engine.zero_grad()
    engine.backward(engine.criterion(engine(x), y.flatten()))
    engine.step()
gpc.destroy()
