"""Healthy scripts of unusual kinds: `doubled.py KIND [right]`. The gradient of the first parameter is doubled on the ranks."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batches():
    draw = torch.Generator().manual_seed(5 + rank)
    return [(torch.randn(6, 8, generator=draw), torch.randn(6, 4, generator=draw)) for _ in range(8)]


def doubled(model):
    if world > 1 and "right" not in sys.argv:
        next(model.parameters()).register_hook(lambda grad: 2 * grad)
    return model


def average(parameters):
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world


def sam():
    """Sharpness-aware minimization: a step up, and the gradient there."""
    model = DDP(doubled(mlp()))
    model, optimizer, own = colonnade.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), batches())
    for x, y in own:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            moves = [0.5 * parameter.grad for parameter in model.parameters()]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()


def lbfgs():
    """An optimizer that calls the model itself."""
    model = DDP(doubled(mlp()))
    model, optimizer, own = colonnade.watch(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), batches())
    for x, y in own:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def noise():
    """The same noise on every rank, added to the gradients."""
    model = DDP(doubled(mlp()))
    model, optimizer, own = colonnade.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), batches())
    draw = torch.Generator().manual_seed(3)
    for x, y in own:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad += 0.1 * torch.randn(parameter.shape, generator=draw)
        optimizer.step()


def two_losses():
    """Two losses, each with a backward pass of its own."""
    model = doubled(mlp())
    model, optimizer, own = colonnade.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), batches())
    for x, y in own:
        optimizer.zero_grad()
        out = model(x)
        F.mse_loss(out, y).backward(retain_graph=True)
        F.l1_loss(out, y).backward()
        average(model.parameters())
        optimizer.step()


def gan():
    """A generator and a critic; the critic's pass leaves gradients in the generator, which are cleared."""
    model = doubled(nn.ModuleDict({"make": nn.Linear(8, 4), "judge": nn.Linear(4, 1)}))
    model, optimizer, own = colonnade.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), batches())
    for x, y in own:
        optimizer.zero_grad()
        made = model["make"](x)
        (F.softplus(-model["judge"](y)) + F.softplus(model["judge"](made))).mean().backward(retain_graph=True)
        model["make"].zero_grad()
        kept = [parameter.grad.clone() for parameter in model["judge"].parameters()]
        F.softplus(-model["judge"](made)).mean().backward()
        for parameter, grad in zip(model["judge"].parameters(), kept, strict=True):
            parameter.grad = grad
        average(model.parameters())
        optimizer.step()


def sparse():
    """An embedding with sparse gradients."""
    model = doubled(nn.Sequential(nn.Embedding(12, 8, sparse=True), nn.Linear(8, 4)))
    draw = torch.Generator().manual_seed(5 + rank)
    own = [(torch.randint(12, (6,), generator=draw), torch.randn(6, 4, generator=draw)) for _ in range(8)]
    model, optimizer, own = colonnade.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), own)
    for x, y in own:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        average(model.parameters())
        optimizer.step()


globals()[sys.argv[1]]()
