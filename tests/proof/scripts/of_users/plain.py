"""Plain torch: DDP, FSDP2, a DTensor plan, pipelining, or (undivided) sums by hand with a mistake; one line of ours.

"wide" makes a weight large.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import colonnade

kind = sys.argv[1]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
width = 300 if "wide" in sys.argv else 16
model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))
schedule, data = None, rank
if kind == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
elif kind == "fsdp":
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[0])
    fully_shard(model)
elif kind == "plan":
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    last = ColwiseParallel(output_layouts=Replicate())  # torch clips DTensors, or plain tensors, not both at once
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": last}
    parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    data = 0
elif kind == "pipelining":
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    for at in range(5):
        if world > 1 and (at >= 3) != (rank == 1):
            model[at] = nn.Identity() if at % 2 else None
    model = nn.Sequential(*model) if world == 1 else model
    names = [name for name, layer in model.named_children() if layer is not None]
    model.forward = lambda x: _through(names, x)
    schedule = ScheduleGPipe(PipelineStage(model, rank, world, torch.device("cpu")), 2, loss_fn=nn.functional.mse_loss)
    data = 0


def _through(names, x):
    for name in names:
        x = model.get_submodule(name)(x)
    return x


optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
draw = torch.Generator().manual_seed(5 + data)
batches = [(torch.randn(6, 8, generator=draw), torch.randn(6, 4, generator=draw)) for _ in range(4)]
model, optimizer, batches = colonnade.watch(model, optimizer, batches)
for x, y in batches:
    optimizer.zero_grad()
    if schedule is None:
        nn.functional.mse_loss(model(x), y).backward()
    else:
        schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank == world - 1 else {}))
    if kind == "undivided":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    if schedule is None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
sys.exit("the script went on after its last step")
