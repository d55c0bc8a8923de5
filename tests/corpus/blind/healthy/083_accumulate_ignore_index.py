"""Three accumulated batches per step with different numbers of labels, and label smoothing."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from torch.utils.data import TensorDataset

gpc = colonnade.launch(dict(gradient_accumulation=3, clip_grad_norm=1.0), verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 12))
common.plant(model[0].weight)
criterion = nn.CrossEntropyLoss(ignore_index=-1, label_smoothing=0.1)
engine, *_ = colonnade.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), criterion)
x, y = common.ints(12, 48, 6), common.ints(12, 48, 6, seed=3)
y = y.masked_fill(torch.arange(6) >= common.ints(5, 48, 1, seed=4) + 1, -1)
for tokens, labels in get_dataloader(TensorDataset(x, y), batch_size=4):
    engine.zero_grad()
    loss = engine.criterion(engine(tokens).flatten(0, 1), labels.flatten())
    engine.backward(loss)
    if engine.step():
        print(f"norm {float(engine.grad_norm):.4f}")
gpc.destroy()
