"""MAML with second-order gradients: each row of a batch is a task with support and query points."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
from torch.func import functional_call

rank, world = common.start()
net = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))
common.plant(net[0].weight)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
phase = common.draw(12, 1, seed=5)
support, query = common.draw(12, 5), common.draw(12, 5, seed=3)
loader = common.loader(support, (support + phase).sin(), query, (query + phase).sin(), batch=2)
net, optimizer, loader = colonnade.watch(net, optimizer, loader)


def adapted_loss(weights, sx, sy, qx, qy):
    inner = F.mse_loss(functional_call(net, weights, (sx[:, None],)), sy[:, None])
    slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    weights = {name: w - 0.1 * s for (name, w), s in zip(weights.items(), slopes)}
    return F.mse_loss(functional_call(net, weights, (qx[:, None],)), qy[:, None])


for tasks in loader:
    weights = {name: p * 1.0 for name, p in net.named_parameters()}
    losses = [adapted_loss(weights, *task) for task in zip(*tasks)]
    optimizer.zero_grad()
    torch.stack(losses).mean().backward()
    common.average_gradients(net)
    optimizer.step()
dist.destroy_process_group()
