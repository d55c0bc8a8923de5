"""Weights that are loaded, or drawn, on ranks: `loads.py KIND`. All kinds but `right`, `seeds` and `another` start from wrong ones."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import colonnade

kind = sys.argv[1]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(10 + world if kind == "another" else 0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
saved = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)) / 3
data, schedule = rank, None
if kind == "replica":
    if rank == world - 1:  # only the last rank loads it, and DDP broadcasts the weights of the first
        model[2].load_state_dict({"weight": saved, "bias": torch.zeros(8)})
    model = nn.parallel.DistributedDataParallel(model)
elif kind in ("right", "one"):
    fully_shard(model)
    if kind == "right" or rank == 0:
        with torch.no_grad():
            model[2].weight.to_local().copy_(saved.chunk(world)[rank])
elif kind == "stages":
    data = 0
    torch.manual_seed(0)
    if world > 1:  # each stage draws its own layers, from the same seed
        layers = [nn.Linear(8, 8), nn.Tanh()] if rank == 0 else [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)]
        model = nn.Sequential(*[nn.Identity() for _ in range(5)])
        for at, layer in enumerate(layers):
            model[2 * rank + at] = layer
        for at in range(5):
            if (at < 2) != (rank == 0):
                model[at] = nn.Identity()
    schedule = ScheduleGPipe(PipelineStage(model, rank, world, torch.device("cpu")), 2, loss_fn=F.mse_loss)
else:
    data = 0
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    local = model[0].weight.to_local()
    with torch.no_grad():
        if kind == "swapped":
            local.copy_(saved.chunk(world)[world - 1 - rank])
        elif kind in ("shards", "seeds"):
            draw = torch.Generator().manual_seed(7 if kind == "shards" else 7 + rank)
            for layer in (model[0], model[2]):
                layer.weight.to_local().normal_(generator=draw)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(5 + data)
batches = [(torch.randn(4, 8, generator=draw), torch.randn(4, 4, generator=draw)) for _ in range(3)]
model, optimizer, batches = colonnade.watch(model, optimizer, batches)
for x, y in batches:
    optimizer.zero_grad()
    if schedule is None:
        F.mse_loss(model(x), y).backward()
    else:
        schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank == world - 1 else {}))
    optimizer.step()
