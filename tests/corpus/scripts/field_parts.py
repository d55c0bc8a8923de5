"""Parts of the scripts `field_*.py`: collectives with a backward pass, models, batches and the usual loop.

With one process (and with the argument "right") `wrong` is False, and a script is without its mistake.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

import colonnade

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
wrong = world > 1 and "right" not in sys.argv
torch.manual_seed(0)


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def deep():
    """A model with two matrices of one shape."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))


def batches(data=rank, rows=6, count=12, shape=()):
    """Inputs and targets; ranks with one number for `data` have the same ones."""
    draw = torch.Generator().manual_seed(5 + data)
    sizes = (rows, *shape)
    return [(torch.randn(*sizes, 8, generator=draw), torch.randn(*sizes, 4, generator=draw)) for _ in range(count)]


def sentences(rows=3, length=8, words=12, count=12):
    """Words and the words to come, the same on every rank."""
    draw = torch.Generator().manual_seed(3)
    return [
        (torch.randint(words, (rows, length), generator=draw), torch.randint(words, (rows, length), generator=draw))
        for _ in range(count)
    ]


def average(parameters):
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world


def train(model, own, loss=F.mse_loss, optimizer=None, before=lambda: None, passes=1, after_pass=lambda number: None):
    """The usual loop: `after_pass` is called after each backward pass, and `before` before each step of the optimizer."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, own = colonnade.watch(model, optimizer, own)
    optimizer.zero_grad()
    for number, (x, y) in enumerate(own, 1):
        (loss(model(x), y) / passes).backward()
        after_pass((number - 1) % passes)
        if number % passes == 0:
            before()
            optimizer.step()
            optimizer.zero_grad()


# --- Shards, and collectives with their backward passes ---


def shard(whole, dim):
    """This rank's part of a weight, as a parameter."""
    return nn.Parameter(distribute_tensor(whole, init_device_mesh("cpu", (world,)), [Shard(dim)]))


def own_chunk(x, dim):
    return x.chunk(world, dim)[rank]


def gathered(x, dim):
    found = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(found, x.contiguous())
    return torch.cat(found, dim)


def summed(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


class Copy(torch.autograd.Function):
    """Nothing in forward, a sum in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return summed(grad)


class Sum(torch.autograd.Function):
    """A sum in forward, nothing in backward."""

    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Gather(torch.autograd.Function):
    """All parts in forward; in backward the part of this rank, of the sum over the ranks if `sums`."""

    @staticmethod
    def forward(ctx, x, dim, sums):
        ctx.dim, ctx.sums = dim, sums
        return gathered(x, dim)

    @staticmethod
    def backward(ctx, grad):
        return own_chunk(summed(grad) if ctx.sums else grad, ctx.dim).contiguous(), None, None


class Scatter(torch.autograd.Function):
    """This rank's part in forward, all parts in backward."""

    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim = dim
        return own_chunk(x, dim).contiguous()

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad, ctx.dim), None


class SumScatter(torch.autograd.Function):
    """This rank's part of the sum in forward, all parts in backward."""

    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim = dim
        return own_chunk(summed(x), dim).contiguous()

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad, ctx.dim), None


def main():
    """Run the kind that the first argument names."""
    sys.modules["__main__"].__dict__[sys.argv[1]]()
