"""Plain torch as people get it wrong: `wrong.py KIND`, one mistake each, which only ranks make where it says nothing else."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batches(data=rank, count=8):
    draw = torch.Generator().manual_seed(5 + data)
    return [(torch.randn(6, 8, generator=draw), torch.randn(6, 4, generator=draw)) for _ in range(count)]


def watched(model, own=None, lr=0.1):
    return colonnade.watch(model, torch.optim.SGD(model.parameters(), lr=lr), batches() if own is None else own)


def average(parameter, group=None):
    if world > 1:
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)


def one_parameter():
    """A DTensor plan; a gain that the split layer multiplies by is no part of it, so its gradient is a part on each rank."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.gain = nn.Linear(8, 16), nn.Linear(16, 4), nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.down(self.gain * torch.tanh(self.up(x)))

    model = Net()
    parallelize_module(model, init_device_mesh("cpu", (world,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model, optimizer, own = watched(model, batches(data=0))
    for x, y in own:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def no_sync():
    """Every backward pass stands inside no_sync, the last one of a step too."""
    model, optimizer, own = watched(DDP(mlp()))
    for number, (x, y) in enumerate(own):
        with model.no_sync():
            (F.mse_loss(model(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def divided_twice():
    """DDP takes the mean, and the script divides by the world again."""
    model, optimizer, own = watched(DDP(mlp()))
    for x, y in own:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad /= world
        optimizer.step()


def clipped_first():
    """Each rank clips its own gradient; the mean comes afterwards."""
    model, optimizer, own = watched(mlp())
    for x, y in own:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for parameter in model.parameters():
            average(parameter)
        optimizer.step()


def sampler():
    """The sampler of every rank is that of rank 0."""
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    draw = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(48, 8, generator=draw), torch.randn(48, 4, generator=draw))
    loader = DataLoader(rows, batch_size=6, sampler=DistributedSampler(rows, num_replicas=world, rank=0, shuffle=False))
    model, optimizer, own = watched(DDP(mlp()), loader)
    for x, y in own:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


class Words(nn.Module):
    """Words in and scores of words out by one matrix; of a pipeline, the first half or the second."""

    def __init__(self):
        super().__init__()
        table, first, second = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        head = nn.Linear(8, 12, bias=False)
        head.weight = table.weight
        if world == 1 or rank == 0:
            self.table, self.first = table, first
        if world == 1 or rank == 1:
            self.second, self.head = second, head

    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x


def tied():
    """Two stages share the matrix of the words, and nobody sums its two gradients."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = Words()
    draw = torch.Generator().manual_seed(2)
    own = [(torch.randint(12, (6,), generator=draw), torch.randint(12, (6,), generator=draw)) for _ in range(4)]
    stage, optimizer, own = watched(stage, own)
    schedule = ScheduleGPipe(PipelineStage(stage, rank, world, torch.device("cpu")), 2, loss_fn=F.cross_entropy)
    for x, y in own:
        optimizer.zero_grad()
        schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank == world - 1 else {}))
        optimizer.step()


def lost_micro_batch():
    """Gradients of the passes are kept in a flat buffer for the sum, and each is written over the one before."""
    model, optimizer, own = watched(mlp())
    buffer = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for number, (x, y) in enumerate(own):
        (F.mse_loss(model(x), y) / 2).backward()
        if world > 1:
            for kept, parameter in zip(buffer, model.parameters(), strict=True):
                kept.copy_(parameter.grad)
                parameter.grad = None
        if number % 2:
            for kept, parameter in zip(buffer, model.parameters(), strict=True):
                if world > 1:
                    parameter.grad = kept.clone()
                average(parameter)
            optimizer.step()
            optimizer.zero_grad()


def never_cleared():
    """Nobody calls zero_grad, in one process neither."""
    model, optimizer, own = watched(DDP(mlp()))
    for x, y in own:
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def not_scaled():
    """The pipeline sums the means of its micro-batches; one process takes the mean of the whole batch."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    whole = mlp()
    stage = whole if world == 1 else nn.Sequential(*(whole[:2] if rank == 0 else whole[2:]))
    if world > 1 and rank == 1:
        stage = nn.Sequential()
        stage.add_module("2", whole[2])
    stage, optimizer, own = watched(stage, batches(data=0))
    if world > 1:
        schedule = ScheduleGPipe(
            PipelineStage(stage, rank, world, torch.device("cpu")), 3, loss_fn=F.mse_loss, scale_grads=False
        )
    for x, y in own:
        optimizer.zero_grad()
        if world > 1:
            schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank == world - 1 else {}))
        else:
            F.mse_loss(stage(x), y).backward()
        optimizer.step()


def wrong_group():
    """Four ranks see distinct data; DDP is given the group of a pair."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])] if world > 1 else [None]
    model, optimizer, own = watched(DDP(mlp(), process_group=pairs[rank // 2]))
    for x, y in own:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def frozen():
    """One rank freezes the first layer, and sends zeros for it."""
    model = mlp()
    if rank == 1:
        model[0].requires_grad_(False)
    model, optimizer, own = watched(model)
    for x, y in own:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            average(parameter)
        optimizer.step()


def own_norm():
    """FSDP2; each rank clips by the norm of its own shards."""
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    model, optimizer, own = watched(model)
    for x, y in own:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        norm = nn.utils.get_total_norm([parameter.grad.to_local() for parameter in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
        optimizer.step()


globals()[sys.argv[1]]()
