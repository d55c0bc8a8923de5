"""Tensor parallelism by a TP plan: attention with packed projections and a gated feed-forward layer."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from torch.utils.data import TensorDataset

class Block(nn.Module):
    def __init__(self, width=8, head=4):
        super().__init__()
        self.head, self.norm1, self.norm2 = head, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, 16), nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (-1, self.head)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


plan = {
    "1.qkv": {"style": "packed_colwise", "sections": 3},
    "1.proj": "rowwise",
    "1.gate": "colwise",
    "1.up": "colwise",
    "1.down": "rowwise",
}
ranks = common.world_size()
gpc = colonnade.launch(dict(parallel=dict(tensor=dict(size=ranks, mode="1d")), clip_grad_norm=1.0), verbose=False)
torch.manual_seed(0)
model = colonnade.parallelize(nn.Sequential(nn.Linear(6, 8), Block(), nn.Linear(8, 3)), plan)
common.plant(model[0].weight)
engine, *_ = colonnade.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), nn.MSELoss())
for x, y in get_dataloader(TensorDataset(common.draw(12, 5, 6), common.draw(12, 5, 3, seed=3)), batch_size=4):
    engine.zero_grad()
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
gpc.destroy()
