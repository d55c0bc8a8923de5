"""A user's own tensor parallel MLP in Colonnade's engine: placements and differentiable collectives."""

import colonnade
import torch
from colonnade import ParallelMode, Shard, place
from colonnade.parallel.collectives import copy, reduce, scatter
from torch import nn
from torch.nn import functional as F

WIDTH, HIDDEN = 12, 32
TENSOR = ParallelMode.TENSOR


class ShardedMLP(nn.Module):
    """Each tensor rank holds HIDDEN / size hidden features."""

    def __init__(self):
        super().__init__()
        up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.up = nn.Parameter(scatter(up.weight.detach(), TENSOR, 0).clone())
        self.up_bias = nn.Parameter(scatter(up.bias.detach(), TENSOR, 0).clone())
        self.down = nn.Parameter(scatter(down.weight.detach(), TENSOR, 1).clone())
        self.down_bias = nn.Parameter(down.bias.detach().clone())
        place(self.up, {TENSOR: Shard(0)})
        place(self.up_bias, {TENSOR: Shard(0)})
        place(self.down, {TENSOR: Shard(1)})

    def forward(self, x):
        h = copy(x, TENSOR)
        h = F.gelu(F.linear(h, self.up, self.up_bias))
        return x + reduce(F.linear(h, self.down), TENSOR) + self.down_bias


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(7, WIDTH)
        self.mlp = ShardedMLP()
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.out(self.mlp(torch.tanh(self.inp(x))))


gpc = colonnade.launch(dict(parallel=dict(tensor=dict(size=2, mode="1d"))), verbose=False)
torch.manual_seed(20)
model = Model()
data = [(torch.randn(8, 7), torch.randint(3, (8,))) for _ in range(4)]  # the same on both tensor ranks
engine, *_ = colonnade.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), nn.CrossEntropyLoss())

for x, y in data:
    engine.zero_grad()
    loss = engine.criterion(engine(x.to(gpc.device)), y.to(gpc.device))
    engine.backward(loss)
    engine.step()
gpc.destroy()
