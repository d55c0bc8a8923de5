"""Mixture of experts over two ranks with a noisy top-2 router and a balance loss."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from colonnade.nn.moe import MoE, TopKRouter, auxiliary_loss
from torch.utils.data import TensorDataset

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(6, 8)
        self.moe = MoE(8, 4, TopKRouter(8, 4, k=2, balance_loss=0.01, z_loss=1e-3, noise=0.01), inner=16)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.inside(x)
        return self.head(x + self.moe(x))


ranks = common.world_size()
gpc = colonnade.launch(dict(parallel=dict(expert=ranks), clip_grad_norm=1.0), verbose=False)
torch.manual_seed(0)
model = Model()
common.plant(model.inside.weight)
engine, *_ = colonnade.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
torch.manual_seed(300 + gpc.get_global_rank())
for x, y in get_dataloader(TensorDataset(common.draw(24, 6), common.ints(3, 24)), batch_size=4):
    engine.zero_grad()
    engine.backward(F.cross_entropy(engine(x), y) + auxiliary_loss(model))
    engine.step()
gpc.destroy()
