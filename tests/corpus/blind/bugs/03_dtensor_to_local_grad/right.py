"""A tensor parallel block on DTensors, with a local kernel in the middle."""

import colonnade
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.nn import functional as F

dist.init_process_group("gloo")
world = dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(3)


def glu_kernel(x, weight, bias):
    """Stands for a fused kernel that knows nothing about DTensor."""
    return F.silu(F.linear(x, weight, bias))


class TensorParallelBlock(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.inp = nn.Linear(width, width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.up.weight = nn.Parameter(distribute_tensor(self.up.weight, mesh, [Shard(0)]))
        self.up.bias = nn.Parameter(distribute_tensor(self.up.bias, mesh, [Shard(0)]))
        self.down.weight = nn.Parameter(distribute_tensor(self.down.weight, mesh, [Shard(1)]))

    def forward(self, x):
        h = DTensor.from_local(self.inp(x), mesh, [Replicate()], run_check=False)
        h = h.to_local(grad_placements=[Partial()])  # each rank uses h for its own columns
        h = glu_kernel(h, self.up.weight.to_local(), self.up.bias.to_local())
        h = DTensor.from_local(h, mesh, [Shard(-1)], run_check=False)
        out = self.down(h).redistribute(mesh, [Replicate()])
        return x + out.to_local()


class Regressor(nn.Module):
    def __init__(self, width=12, hidden=20):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.block = TensorParallelBlock(width, hidden)
        self.last = nn.Linear(width, 2)

    def forward(self, x):
        return self.last(self.block(torch.tanh(self.first(x))))


model = Regressor()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
batches = [(torch.randn(8, 6), torch.randn(8, 2)) for _ in range(4)]  # the same on all tensor ranks
model, optimizer, batches = colonnade.watch(model, optimizer, batches)

for step, (x, y) in enumerate(batches):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.4f}")
dist.destroy_process_group()
