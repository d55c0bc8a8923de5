"""Context parallelism: ring attention over the tokens of two ranks, uneven shards, (sum, count)."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from colonnade.nn import SelfAttention
from colonnade.nn.sequence import sequence_positions, split_sequence

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(12, 8), nn.Embedding(16, 8)
        self.attention = SelfAttention(8, heads=2, causal=True, over="ring")
        self.head = nn.Linear(8, 12)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(sequence_positions(tokens.size(1)))
        return self.head(x + self.attention(x))


gpc = colonnade.launch(dict(parallel=dict(sequence=2), clip_grad_norm=1.0), verbose=False)
torch.manual_seed(0)
model = Model()
common.plant(model.words.weight)
engine, *_ = colonnade.initialize(model, torch.optim.SGD(model.parameters(), lr=0.2))
batches = list(common.ints(12, 12, 10).split(4))  # equal on both ranks of the sequence group
_, _, batches = colonnade.watch(engine, None, batches)
for tokens in batches:
    x, y = split_sequence(tokens[:, :-1].contiguous()), split_sequence(tokens[:, 1:].contiguous())
    engine.zero_grad()
    loss = F.cross_entropy(engine(x).flatten(0, 1), y.flatten(), reduction="sum")
    engine.backward((loss, y.numel()))
    engine.step()
gpc.destroy()
