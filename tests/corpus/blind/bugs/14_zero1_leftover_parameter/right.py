"""A small ZeRO-1: each rank keeps the AdamW state of its share of the parameters."""

import colonnade
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 16
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(15)


class ShardedAdamW(torch.optim.AdamW):
    """AdamW over the parameters of this rank; afterwards, every rank sends its own."""

    def __init__(self, parameters, **options):
        self.all = list(parameters)
        per = -(-len(self.all) // world)
        super().__init__(self.all[rank * per : (rank + 1) * per], **options)
        self.owner = [min(i // per, world - 1) for i in range(len(self.all))]

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for p, owner in zip(self.all, self.owner):
            dist.broadcast(p, owner)
        return loss


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(10, 24)
        self.slope = nn.PReLU()
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        return self.head(self.slope(self.inp(x)))


model = Net()
optimizer = ShardedAdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(64, 10), torch.randint(3, (64,)))
loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=DistributedSampler(data, shuffle=False))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)

for x, y in loader:
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
dist.destroy_process_group()
