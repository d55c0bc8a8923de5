"""Mean teacher: an EMA teacher without gradients gives targets for perturbed inputs of the student."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
import copy

rank, world = common.start()
student = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
teacher = copy.deepcopy(student).requires_grad_(False)
common.plant(student[0].weight)
model = DDP(student)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = common.loader(common.draw(24, 8), common.ints(3, 24))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
torch.manual_seed(77 + rank)
for step, (x, y) in enumerate(loader):
    logits = model(x + 0.1 * torch.randn_like(x))
    with torch.no_grad():
        goal = teacher(x + 0.1 * torch.randn_like(x)).softmax(-1)
    consistency = (logits.softmax(-1) - goal).square().sum(-1).mean()
    loss = F.cross_entropy(logits, y) + 0.5 * consistency
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    decay = min(0.99, (step + 1) / (step + 10))
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters()):
            slow.mul_(decay).add_(fast, alpha=1 - decay)
dist.destroy_process_group()
