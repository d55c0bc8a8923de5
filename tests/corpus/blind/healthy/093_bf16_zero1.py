"""bf16 with fp32 master weights and ZeRO-1; the loss in fp32."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from torch.utils.data import TensorDataset

gpc = colonnade.launch(dict(bf16=True, zero=1, clip_grad_norm=1.0), verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
common.plant(model[0].weight)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
engine, *_ = colonnade.initialize(model, optimizer, nn.CrossEntropyLoss())
for x, y in get_dataloader(TensorDataset(common.draw(24, 8), common.ints(4, 24)), batch_size=4):
    engine.zero_grad()
    loss = engine.criterion(engine(x).float(), y)
    engine.backward(loss)
    engine.step()
    if gpc.get_global_rank() == 0:
        print(f"loss {loss.item():.3f}")
gpc.destroy()
