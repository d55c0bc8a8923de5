"""A small language model of colonnade.nn layers with a tied, vocabulary-parallel head, scheme 1d."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from colonnade.nn import MLP, Classifier, CrossEntropyLoss, Embedding, LayerNorm, PositionEmbedding, SelfAttention
from torch.utils.data import TensorDataset

class Model(nn.Module):
    def __init__(self, words=22, length=6, hidden=8):
        super().__init__()
        self.embedding, self.position = Embedding(words, hidden), PositionEmbedding(length, hidden)
        self.norm1, self.norm2, self.norm3 = LayerNorm(hidden), LayerNorm(hidden), LayerNorm(hidden)
        self.attention, self.mlp = SelfAttention(hidden, 2, causal=True), MLP(hidden, 16)
        self.head = Classifier(hidden, words, weight=self.embedding.weight)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position(tokens.shape[1])
        x = x + self.attention(self.norm1(x))
        return self.head(self.norm3(x + self.mlp(self.norm2(x))))


ranks = common.world_size()
gpc = colonnade.launch(dict(parallel=dict(tensor=dict(size=ranks, mode="1d")), clip_grad_norm=1.0), verbose=False)
torch.manual_seed(0)
model = Model()
common.plant(next(model.parameters()))
engine, *_ = colonnade.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), CrossEntropyLoss())
tokens = common.ints(22, 12, 7)
for x, y in get_dataloader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4):
    engine.zero_grad()
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
gpc.destroy()
