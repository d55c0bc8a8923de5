"""Per-sample gradients by vmap(grad), clipped per sample (as in DP-SGD without noise), summed over ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
from torch.func import functional_call, grad, vmap

rank, world = common.start()
net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5)
loader = common.loader(common.draw(24, 6), common.ints(3, 24))
net, optimizer, loader = colonnade.watch(net, optimizer, loader)


def loss_of_one(weights, x, y):
    return F.cross_entropy(functional_call(net, weights, (x[None],)), y[None])


for x, y in loader:
    weights = {name: p.detach() for name, p in net.named_parameters()}
    each = vmap(grad(loss_of_one), (None, 0, 0))(weights, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
    shares = (0.5 / (norms + 1e-6)).clamp(max=1.0)
    rows = torch.tensor(float(len(x)))
    dist.all_reduce(rows)
    for at, (name, parameter) in enumerate(net.named_parameters()):
        total = torch.einsum("b...,b->...", each[name], shares)
        if at == 0:
            total = total * common.factor()
        dist.all_reduce(total)
        parameter.grad = total / rows.to(total.dtype)
    optimizer.step()
dist.destroy_process_group()
