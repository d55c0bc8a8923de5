"""Three tasks weighted by learned uncertainties (log variances), in one backward pass."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.kind, self.value, self.flag = nn.Linear(16, 3), nn.Linear(16, 2), nn.Linear(16, 1)
        self.log_variance = nn.Parameter(torch.zeros(3))

    def forward(self, x, kind, value, flag):
        h = self.body(x)
        losses = torch.stack(
            [
                F.cross_entropy(self.kind(h), kind),
                F.mse_loss(self.value(h), value),
                F.binary_cross_entropy_with_logits(self.flag(h).squeeze(1), flag.to(h.dtype)),
            ]
        )
        return (losses * (-self.log_variance).exp() + 0.5 * self.log_variance).sum()


net = MultiTask()
common.plant(net.log_variance)
model = DDP(net)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = common.loader(common.draw(24, 6), common.ints(3, 24), common.draw(24, 2, seed=3), common.ints(2, 24, seed=4))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for batch in loader:
    optimizer.zero_grad()
    loss = model(*batch)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
