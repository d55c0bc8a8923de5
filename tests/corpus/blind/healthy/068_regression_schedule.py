"""Data parallelism with clipping and a cosine schedule, MSE over vectors."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from torch.utils.data import TensorDataset

gpc = colonnade.launch(dict(clip_grad_norm=0.5), verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
common.plant(model[0].weight)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
engine, _, _, cosine = colonnade.initialize(model, optimizer, nn.MSELoss(), lr_scheduler=cosine)
data = TensorDataset(common.draw(24, 8), common.draw(24, 4, seed=3))
for x, y in get_dataloader(data, batch_size=4, shuffle=True):
    engine.zero_grad()
    loss = engine.criterion(engine(x), y)
    engine.backward(loss)
    if engine.step():
        cosine.step()
    print(f"loss {loss.item():.4f}, norm {float(engine.grad_norm):.4f}")
gpc.destroy()
