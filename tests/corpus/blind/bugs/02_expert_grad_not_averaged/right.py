"""A mixture of experts: each rank owns a part of the experts and its own part of the data."""

import colonnade
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXPERTS, WIDTH, HIDDEN, GLOBAL_BATCH = 4, 12, 24, 16
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)


def gather(x):
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def reduce_scatter(x):
    x = x.contiguous().clone()
    dist.all_reduce(x)
    return x.chunk(world)[rank].contiguous()


class Dispatch(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: gather(x))
    backward = staticmethod(lambda ctx, g: reduce_scatter(g))


class Combine(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: reduce_scatter(x))
    backward = staticmethod(lambda ctx, g: gather(g))


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        own = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
        self.first = own.start
        self.w1 = nn.Parameter((torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)[own].clone())
        self.w2 = nn.Parameter((torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)[own].clone())

    def forward(self, x):
        gate = self.router(x).softmax(-1)
        gate = gate * F.one_hot(gate.argmax(-1), EXPERTS)  # top-1
        x_all, gate_all = Dispatch.apply(x), Dispatch.apply(gate)
        gate_own = gate_all[:, self.first : self.first + len(self.w1)]
        hidden = F.gelu(torch.einsum("tw,ewh->teh", x_all, self.w1))
        return x + Combine.apply(torch.einsum("teh,ehw,te->tw", hidden, self.w2, gate_own))


model = nn.Sequential(nn.Linear(8, WIDTH), MoE(), nn.Linear(WIDTH, 3))
data = TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer, loader = colonnade.watch(model, optimizer, loader)


def sync_gradients():
    for name, p in model.named_parameters():
        if not name.endswith((".w1", ".w2")):  # experts live on one rank
            dist.all_reduce(p.grad)
        p.grad /= world


for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    sync_gradients()
    optimizer.step()
dist.destroy_process_group()
