"""Truncated backpropagation with an engine: an LSTM whose state is carried between the pieces of a text."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader

class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(10, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 10)

    def forward(self, tokens, state):
        y, state = self.cell(self.words(tokens), state)
        return self.head(y), state


gpc = colonnade.launch(dict(clip_grad_norm=0.25), verbose=False)
torch.manual_seed(0)
model = Stream()
common.plant(model.words.weight)
engine, *_ = colonnade.initialize(model, torch.optim.SGD(model.parameters(), lr=0.5))
text = common.ints(10, 8, 16)
mine = text.chunk(gpc.world_size)[gpc.get_global_rank()]
pieces = [mine[:, at : at + 6] for at in (0, 5, 10)]
_, _, pieces = colonnade.watch(engine, None, pieces)
state = None
for piece in pieces:
    if state is None:
        zeros = torch.zeros(1, len(piece), 8, dtype=model.head.weight.dtype)
        state = (zeros, zeros)
    logits, state = engine(piece[:, :-1], state)
    state = tuple(part.detach() for part in state)
    engine.zero_grad()
    engine.backward(F.cross_entropy(logits.transpose(1, 2), piece[:, 1:]))
    engine.step()
gpc.destroy()
