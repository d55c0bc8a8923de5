"""Regression with importance weights in Colonnade's engine."""

import colonnade
import torch
from colonnade.utils import get_dataloader
from torch import nn
from torch.utils.data import TensorDataset

GLOBAL_BATCH = 12


def weighted_mse(output, target):
    """Mean square error; the last column of the target is the weight of the sample."""
    value, weight = target[:, :-1], target[:, -1]
    error = (output - value).square().mean(1)
    return (weight * error).sum() / weight.sum()


gpc = colonnade.launch(dict(clip_grad_norm=5.0), verbose=False)
torch.manual_seed(21)
model = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 2))
x = torch.randn(72, 6)
y = torch.stack([x.sum(1), x.prod(1)], 1)
weight = torch.rand(72, 1) ** 3 * 10  # some samples count much more
data = TensorDataset(x, torch.cat([y, weight], 1))
loader = get_dataloader(data, batch_size=GLOBAL_BATCH // gpc.data_parallel_size)
engine, *_ = colonnade.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), weighted_mse)

for step, (x, y) in enumerate(loader):
    if step == 4:
        break
    engine.zero_grad()
    loss = engine.criterion(engine(x.to(gpc.device)), y.to(gpc.device))
    engine.backward(loss)
    engine.step()
gpc.destroy()
