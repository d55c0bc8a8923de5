"""Masked language model, random masks in the loop, the loss as (sum, count)."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from torch.utils.data import TensorDataset

gpc = colonnade.launch(dict(clip_grad_norm=1.0), verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 15))
common.plant(model[0].weight)
engine, *_ = colonnade.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
torch.manual_seed(200 + gpc.get_global_rank())
for (tokens,) in get_dataloader(TensorDataset(common.ints(15, 24, 7)), batch_size=4):
    chosen = torch.rand(tokens.shape) < 0.3
    logits = engine(tokens.masked_fill(chosen, 15))
    losses = F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
    engine.zero_grad()
    engine.backward(((losses * chosen).sum(), chosen.sum().clamp_min(1)))
    engine.step()
gpc.destroy()
