"""A regression with heavy-tailed targets; gradients are limited element by element."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH, LIMIT = 8, 0.05
accelerator = Accelerator(cpu=True)
set_seed(24)

net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
for p in net.parameters():
    p.register_hook(lambda grad: grad.clamp(-LIMIT, LIMIT))
x = torch.randn(64, 6)
y = x.sum(1, keepdim=True) * torch.rand(64, 1).mul(3).exp()
loader = DataLoader(TensorDataset(x, y), batch_size=GLOBAL_BATCH // accelerator.num_processes)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)

for step, (x, y) in enumerate(loader):
    if step == 4:
        break
    optimizer.zero_grad()
    loss = nn.functional.smooth_l1_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    accelerator.print(f"step {step} loss {loss.item():.3f}")
accelerator.end_training()
