"""Data parallelism by hand: a hook all-reduces each gradient as soon as it is complete."""

import colonnade
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, ACCUMULATE = 8, 2
dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(18)

model = nn.Sequential(nn.Linear(8, 24), nn.SiLU(), nn.Linear(24, 24), nn.SiLU(), nn.Linear(24, 2))
micro = 0


def reduce_hook(p):
    dist.all_reduce(p.grad)


for p in model.parameters():
    p.register_post_accumulate_grad_hook(reduce_hook)

data = TensorDataset(torch.randn(64, 8), torch.randn(64, 2))
loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=DistributedSampler(data, shuffle=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = colonnade.watch(model, optimizer, loader)

for micro, (x, y) in enumerate(loader):
    loss = nn.functional.mse_loss(model(x), y)
    (loss / (world * ACCUMULATE)).backward()  # the hook sums over the ranks
    if (micro + 1) % ACCUMULATE == 0:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
