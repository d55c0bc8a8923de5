"""A plain torch script that saves after each step and resumes; an argument names the thing that it forgets."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import colonnade

folder, forgets = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(
    nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 2))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
data = TensorDataset(torch.randn(96, 6), torch.randn(96, 2))
sampler = DistributedSampler(data, shuffle=True)
done, file, random = 0, folder / "last.pt", folder / f"random{dist.get_rank()}.pt"
if file.exists():
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    if forgets != "optimizer":
        optimizer.load_state_dict(saved["optimizer"])
    if forgets != "schedule":
        schedule.load_state_dict(saved["schedule"])
    done = saved["done"]
# With dropout, ranks draw masks of their own; a run on other ranks has other masks.
if forgets == "layout":
    model.eval()
if file.exists() and forgets not in ("random", "layout"):
    torch.set_rng_state(torch.load(random))
else:
    torch.manual_seed(100 + dist.get_rank())
model, optimizer, _ = colonnade.watch(model, optimizer)
batch_size = 8 // dist.get_world_size()
loader = DataLoader(data, batch_size=batch_size, sampler=sampler, generator=torch.Generator())
for number, (x, y) in enumerate(loader):
    if number < done and forgets != "data":
        continue
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    schedule.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    torch.save(torch.get_rng_state(), random)
    if dist.get_rank() == 0:
        torch.save({**state, "done": number + 1}, file.with_suffix(".new"))
        os.replace(file.with_suffix(".new"), file)
    dist.barrier()
