"""Schedule-free SGD as an optimizer of its own: gradients at y, iterates z and averages x."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class ScheduleFree(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, dict(lr=lr, beta=beta))
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for y in group["params"]:
                state = self.state[y]
                if not state:
                    state["z"], state["x"] = y.clone(), y.clone()
                state["z"].sub_(y.grad, alpha=group["lr"])
                state["x"].lerp_(state["z"], 1 / (self.count + 1))
                y.copy_(torch.lerp(state["z"], state["x"], group["beta"]))


net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
common.plant(net[0].weight)
model = DDP(net)
optimizer = ScheduleFree(model.parameters())
loader = common.loader(common.draw(24, 6), common.draw(24, 1, seed=3))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
