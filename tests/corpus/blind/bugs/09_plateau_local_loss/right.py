"""DDP with a learning rate that drops as soon as the loss stops falling."""

import colonnade
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau

GLOBAL_BATCH = 8
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(9)

x = torch.randn(4, GLOBAL_BATCH, 6)
y = x.sum(-1, keepdim=True)
y[0, : GLOBAL_BATCH // 2] *= 3  # the first half of the first batch is hard,
y[1, GLOBAL_BATCH // 2 :] *= 2  # and the second half of the second one
share = slice(rank * GLOBAL_BATCH // world, (rank + 1) * GLOBAL_BATCH // world)
batches = [(a[share], b[share]) for a, b in zip(x, y)]

model = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.0)
model, optimizer, batches = colonnade.watch(model, optimizer, batches)

for step, (inputs, target) in enumerate(batches):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), target)
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    mean /= world
    scheduler.step(mean.item())
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {mean.item():.3f} lr {optimizer.param_groups[0]['lr']}")
dist.destroy_process_group()
