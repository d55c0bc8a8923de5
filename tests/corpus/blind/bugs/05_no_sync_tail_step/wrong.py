"""DDP with gradient accumulation; the last step of an epoch takes what is left."""

import contextlib

import colonnade
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, ACCUMULATE = 8, 2
dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(5)

data = TensorDataset(torch.randn(40, 10), torch.randn(40, 1))
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=sampler)
steps = len(loader)

model = DDP(nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = colonnade.watch(model, optimizer, loader)

optimizer.zero_grad()
for i, (x, y) in enumerate(loader):
    last = i + 1 == steps
    boundary = (i + 1) % ACCUMULATE == 0
    with contextlib.nullcontext() if boundary else model.no_sync():
        loss = nn.functional.mse_loss(model(x), y) / ACCUMULATE
        loss.backward()
    if boundary or last:
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"micro-batch {i} loss {loss.item() * ACCUMULATE:.4f}")
dist.destroy_process_group()
