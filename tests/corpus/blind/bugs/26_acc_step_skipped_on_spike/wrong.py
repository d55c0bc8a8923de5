"""Training on noisy data; updates are skipped when the loss spikes."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH, SPIKE = 8, 3.0
accelerator = Accelerator(cpu=True)
set_seed(28)

net = nn.Sequential(nn.Linear(5, 24), nn.ELU(), nn.Linear(24, 1))
x = torch.randn(64, 5)
y = x.sum(1, keepdim=True) * 0.3
y[2] += 5.0  # outliers of the sensor
y[21] -= 30.0
loader = DataLoader(TensorDataset(x, y), batch_size=GLOBAL_BATCH // accelerator.num_processes)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)

skipped = 0
for step, (x, y) in enumerate(loader):
    if step == 4:
        break
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    current = loss.detach()
    if current.item() > SPIKE:
        skipped += 1
        continue
    optimizer.step()
    accelerator.print(f"step {step} loss {current.item():.3f}, {skipped} skipped")
accelerator.end_training()
