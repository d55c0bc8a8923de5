"""An ensemble by torch.func: stacked parameters, vmap over members, one optimizer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
from torch.func import functional_call, stack_module_state, vmap

rank, world = common.start()
members = [nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(3)]
stacked, _ = stack_module_state(members)


class Ensemble(nn.Module):
    def __init__(self):
        super().__init__()
        self.names = list(stacked)
        self.weights = nn.ParameterList(nn.Parameter(stacked[name].detach().clone()) for name in self.names)
        self.shell = [members[0]]  # not a submodule

    def forward(self, x):
        def one(*weights):
            return functional_call(self.shell[0], dict(zip(self.names, weights)), (x,))

        return vmap(one)(*self.weights)


net = Ensemble()
common.plant(net.weights[0])
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = common.loader(common.draw(24, 5), common.draw(24, 1, seed=3))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    outputs = model(x)
    (outputs - y).square().mean((1, 2)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
