"""FSDP2 with norm gains that are kept whole (and in full precision) on every rank."""

import colonnade
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, WIDTH = 16, 16
dist.init_process_group("gloo")
world = dist.get_world_size()
mesh = dist.init_device_mesh("cpu", (world,))
torch.manual_seed(4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain
        return x + self.down(F.silu(self.up(h)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.out(self.blocks(self.inp(x)))


model = Net()
whole = {p for name, p in model.named_parameters() if name.endswith("gain")}
for block in model.blocks:
    fully_shard(block, mesh=mesh, ignored_params=whole)
fully_shard(model, mesh=mesh, ignored_params=whole)

data = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=DistributedSampler(data, shuffle=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, foreach=False)
model, optimizer, loader = colonnade.watch(model, optimizer, loader)

for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
