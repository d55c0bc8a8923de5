"""Multi-task training with a hand-written flat all-reduce of the gradients."""

import colonnade
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 8
dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(16)


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 24), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(24, 1) for _ in range(2))

    def forward(self, x, task):
        h = self.trunk(x)
        out = torch.zeros(len(x))
        for i, head in enumerate(self.heads):
            rows = (task == i).nonzero().squeeze(1)
            if len(rows):  # head i takes part only if the batch has its task
                out = out.index_copy(0, rows, head(h[rows]).squeeze(1))
        return out


def average_gradients(parameters):
    """One all-reduce for all gradients."""
    parameters = list(parameters)
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    grads = [p.grad for p in parameters]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= world
    for g, part in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(part.view_as(g))


x, task = torch.randn(64, 10), torch.arange(64) % 2  # the file alternates between the tasks
y = torch.where(task == 0, x.sum(1), x[:, 0] * x[:, 1])
data = TensorDataset(x, task, y)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=DistributedSampler(data, shuffle=False))
model = TwoTasks()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = colonnade.watch(model, optimizer, loader)

for x, task, y in loader:
    optimizer.zero_grad()
    loss = (model(x, task) - y).square().mean()
    loss.backward()
    average_gradients(model.parameters())
    optimizer.step()
dist.destroy_process_group()
