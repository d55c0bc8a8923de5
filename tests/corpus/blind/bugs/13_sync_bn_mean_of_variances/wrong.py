"""DDP with a small synchronised batch norm for CPU ranks (torch's own needs GPUs)."""

import colonnade
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 12
dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(14)


class SyncBatchNorm(nn.Module):
    def __init__(self, features, momentum=0.1, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))
        self.momentum, self.eps = momentum, eps

    def forward(self, x):
        if not self.training:
            return self.normalize(x, self.running_mean, self.running_var)
        mean = all_reduce(x.mean(0)) / world
        var = all_reduce(x.var(0, unbiased=False)) / world
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var, self.momentum)
        return self.normalize(x, mean, var)

    def normalize(self, x, mean, var):
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


model = DDP(
    nn.Sequential(
        nn.Linear(9, 20),
        SyncBatchNorm(20),
        nn.ReLU(),
        nn.Linear(20, 20),
        SyncBatchNorm(20),
        nn.ReLU(),
        nn.Linear(20, 3),
    )
)
data = TensorDataset(torch.randn(48, 9), torch.randint(3, (48,)))
loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=DistributedSampler(data, shuffle=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
model, optimizer, loader = colonnade.watch(model, optimizer, loader)

for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
