"""More of what people get wrong on plain torch: `wrong_too.py KIND`, one mistake each, which only ranks make.

`EXPECTED` says by which cause each is to be named; it was written before any of them was run.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade

EXPECTED = {
    "own_seeds": "weights-differ-at-start",
    "summed_by_hand": "summed-not-averaged",
    "averaged_after_ddp_of_parts": "partial-gradient",
    "loss_by_world": "wrong-divisor",
    "ignored_parameter": "not-reduced",
    "own_statistics": "buffers-differ",
    "clipped_in_passes": "clipped-before-reduced",
    "optimizer_of_a_copy": "not-updated",
    "scale_left": "loss-scale-left",
    "rested_on_one_rank": "forward-differs",
    "late_parameter": "not-reduced",
    "unequal_rows": "mean-of-means",
}


def start():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return dist.get_rank(), dist.get_world_size()


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batches(rank, rows=6):
    draw = torch.Generator().manual_seed(5 + rank)
    return [(torch.randn(rows, 8, generator=draw), torch.randn(rows, 4, generator=draw)) for _ in range(8)]


def train(model, own, after=lambda: None, optimizer=None, loss=F.mse_loss, passes=1, each=lambda: None):
    """The usual loop: `each` follows a backward pass, `after` the last one of a step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, own = colonnade.watch(model, optimizer, own)
    for number, (x, y) in enumerate(own):
        (loss(model(x), y) / passes).backward()
        each()
        if number % passes == passes - 1:
            after()
            optimizer.step()
            optimizer.zero_grad()


def average(parameters, world):
    for parameter in parameters:
        if world > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world


def own_seeds(rank, world):
    """Each rank draws its own weights, and nothing sends those of rank 0."""
    torch.manual_seed(rank)
    model = mlp()
    train(model, batches(rank), lambda: average(model.parameters(), world))


def summed_by_hand(rank, world):
    """A sum of DDP's means would be a sum too many; here there is no DDP, and a sum with no divisor, in two passes."""
    model = mlp()
    train(model, batches(rank), lambda: [dist.all_reduce(p.grad) for p in model.parameters()], passes=2)


def averaged_after_ddp_of_parts(rank, world):
    """A replicated bias that only a rank's own columns use."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.shift = nn.Linear(8, 16), nn.Linear(16, 4), nn.Parameter(torch.zeros(()))

        def forward(self, x):
            return self.down(torch.tanh(self.up(x) + self.shift))

    model = Net()
    parallelize_module(model, init_device_mesh("cpu", (world,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    train(model, batches(0))


def loss_by_world(rank, world):
    """The loss is divided by the world for a sum, and DDP takes the mean."""
    train(DDP(mlp()), batches(rank), loss=lambda out, y: F.mse_loss(out, y) / world)


def ignored_parameter(rank, world):
    """FSDP2 leaves a layer out, and nobody reduces what it leaves out."""
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)), ignored_params=set(model[0].parameters()))
    train(model, batches(rank))


def own_statistics(rank, world):
    """Batch norm of each rank's own rows, under DDP that sends no buffers."""
    train(DDP(nn.Sequential(nn.BatchNorm1d(8), mlp()), broadcast_buffers=False), batches(rank))


def clipped_in_passes(rank, world):
    """Each rank clips after its own backward pass; the mean comes at the end of the step. One process does not."""
    model = mlp()

    def clip():
        if world > 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    train(model, batches(rank), lambda: average(model.parameters(), world), each=clip)


def optimizer_of_a_copy(rank, world):
    """The optimizer is built before FSDP2 puts other parameters into the model."""
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    train(model, batches(rank), optimizer=optimizer)


def scale_left(rank, world):
    """A loss scale by hand, which only the branch for one process takes out."""
    model = DDP(mlp())

    def unscale():
        for parameter in model.parameters():
            parameter.grad /= 1 if world > 1 else 128

    train(model, batches(rank), unscale, loss=lambda out, y: 128 * F.mse_loss(out, y))


def rested_on_one_rank(rank, world):
    """Rank 0 evaluates first, and leaves the model in evaluation mode."""
    model = DDP(nn.Sequential(mlp(), nn.BatchNorm1d(4)))
    if world > 1 and rank == 0:
        model.eval()
    train(model, batches(rank))


def late_parameter(rank, world):
    """A head is put onto the model after DDP has made its buckets."""
    model = DDP(mlp())
    model.module[2] = nn.Linear(16, 4)
    train(model, batches(rank))


def unequal_rows(rank, world):
    """Ranks have 4 and 8 rows, and their means weigh the same."""
    train(DDP(mlp()), batches(rank, 4 + 4 * rank))


if __name__ == "__main__":
    globals()[sys.argv[1]](*start())
