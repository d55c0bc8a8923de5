"""Two open bugs of the zero-bubble schedules of torch.distributed.pipelining; the first argument chooses one.

- `twice` (pytorch #180952): a weight that is used at two places on one path gets a wrong gradient.
- `replicas` (pytorch #144530): with DistributedDataParallel, gradients of the stages are not averaged, because the schedule
  computes weight gradients with `torch.autograd.grad`, so the hooks of DDP do not run.

In one process the same layers run without a pipeline.
"""

import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.nn.functional import mse_loss

import colonnade

warnings.filterwarnings("ignore")
kind, rows = sys.argv[1], 8
dist.init_process_group("gloo")
world = dist.get_world_size()
depth = 2 if world > 1 else 1


class Layers(nn.Module):
    """The layers of one stage, or of all; they keep their numbers as names."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(6, 6) for number in range(first, last)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
            if kind == "twice":
                x = torch.tanh(layer(x))
        return x


torch.manual_seed(0)
whole = Layers(0, 2 * depth if world > 1 else 4)
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randn(64, 6))
if world > 1:
    mesh = init_device_mesh("cpu", (world // depth, depth), mesh_dim_names=("dp", "pp"))
    at, group = mesh["pp"].get_local_rank(), mesh.get_group("pp")
    model = Layers(2 * at, 2 * at + 2)
    model.load_state_dict({name: whole.state_dict()[name] for name in model.state_dict()})
    module = (
        nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"), find_unused_parameters=True)
        if world > depth
        else model
    )
    stage = PipelineStage(module, at, depth, torch.device("cpu"), group=group)
    schedule = ScheduleInterleavedZeroBubble([stage], 2, loss_fn=mse_loss)
    replica, replicas = mesh["dp"].get_local_rank(), world // depth
else:
    model, replica, replicas = whole, 0, 1
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = torch.utils.data.DistributedSampler(data, replicas, replica, shuffle=False)
loader = torch.utils.data.DataLoader(data, batch_size=rows, sampler=sampler)
model, optimizer, _ = colonnade.watch(model, optimizer)
for x, y in loader:
    optimizer.zero_grad()
    if world == 1:
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            (mse_loss(model(part), target) / 2).backward()
    else:
        schedule.step(*([x] if at == 0 else []), target=y if at == depth - 1 else None)
    optimizer.step()
os._exit(0)
