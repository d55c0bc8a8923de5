"""A plain torch script that averages gradients itself with asynchronous collectives; an argument names its mistake."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import colonnade

mistake = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
batches = [(torch.randn(4, 6), torch.randn(4, 2)) for _ in range(4)]
model, optimizer, batches = colonnade.watch(model, optimizer, batches)
for x, y in batches:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    works = []
    for number, parameter in enumerate(model.parameters()):
        if mistake == "scaled" and number == 1:
            work = dist.all_reduce(parameter.grad, async_op=True)
            parameter.grad /= dist.get_world_size()
            works.append(work)
            continue
        parameter.grad /= dist.get_world_size()
        work = dist.all_reduce(parameter.grad, async_op=True)
        if mistake != "forgotten" or number != 2:
            works.append(work)
    if mistake == "late":
        optimizer.step()
    for work in works:
        work.wait()
    if mistake != "late":
        optimizer.step()
dist.barrier()
