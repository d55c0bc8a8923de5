"""DeepSpeed without ZeRO; the loop accumulates gradients itself."""

import contextlib

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, ACCUMULATE = 8, 2
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # plain gloo
deepspeed.init_distributed("gloo")
world = dist.get_world_size()
torch.manual_seed(51)

net = nn.Sequential(nn.Linear(10, 40), nn.SiLU(), nn.Linear(40, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
config = dict(train_micro_batch_size_per_gpu=GLOBAL_BATCH // world, zero_optimization=dict(stage=0))
model, optimizer, _, _ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
x = torch.randn(64, 10)
data = TensorDataset(x, x.sin().sum(1, keepdim=True))
loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=DistributedSampler(data, shuffle=False))

batches = iter(loader)
for step in range(len(loader) // ACCUMULATE):
    total = 0.0
    for micro in range(ACCUMULATE):
        x, y = next(batches)
        context = model.no_sync() if micro < ACCUMULATE else contextlib.nullcontext()
        with context:
            loss = F.mse_loss(model(x), y) / ACCUMULATE
            model.backward(loss)
        total += loss.item()
    model.step()
    if dist.get_rank() == 0:
        print(f"step {step} loss {total:.4f}")
dist.destroy_process_group()
