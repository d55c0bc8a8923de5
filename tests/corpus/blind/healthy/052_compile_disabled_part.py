"""torch.compile with the eager backend and a part that is excluded by torch.compiler.disable."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.out = nn.Linear(6, 12), nn.Linear(12, 3)

    @torch.compiler.disable
    def sorted_features(self, h):
        return h.sort(dim=-1).values

    def forward(self, x):
        return self.out(self.sorted_features(F.silu(self.inside(x))))


net = Net()
common.plant(net.inside.weight)
model = torch.compile(DDP(net), backend="eager", disable=True)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
loader = common.loader(common.draw(24, 6), common.ints(3, 24))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
