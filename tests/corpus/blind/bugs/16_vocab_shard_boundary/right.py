"""A vocabulary-parallel embedding in front of a replicated model; all ranks see the same tokens."""

import colonnade
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH = 20, 12
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(17)


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class VocabParallelEmbedding(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        whole = torch.randn(vocab, width)
        self.start, self.end = rank * vocab // world, (rank + 1) * vocab // world
        self.weight = nn.Parameter(whole[self.start : self.end].clone())

    def forward(self, x):
        outside = (x < self.start) | (x >= self.end)
        local = (x - self.start).clamp(0, len(self.weight) - 1)
        rows = F.embedding(local, self.weight).masked_fill(outside[..., None], 0.0)
        return SumOverRanks.apply(rows)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = VocabParallelEmbedding(VOCAB, WIDTH)
        self.rnn = nn.RNN(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
text = torch.randint(VOCAB, (4, 6, 11))
batches = [(t[:, :-1], t[:, 1:]) for t in text]
model, optimizer, batches = colonnade.watch(model, optimizer, batches)

for tokens, labels in batches:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
dist.destroy_process_group()
