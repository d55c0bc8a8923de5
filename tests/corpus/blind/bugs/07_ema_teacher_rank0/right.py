"""Mean-teacher training: the student learns from labels and from an average of its own weights."""

import copy

import colonnade
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, DECAY = 8, 0.8
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)

net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 6))
teacher = copy.deepcopy(net).requires_grad_(False)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
data = TensorDataset(torch.randn(64, 12), torch.randint(6, (64,)))
loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=DistributedSampler(data, shuffle=False))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)


@torch.no_grad()
def update_teacher():
    for average, p in zip(teacher.parameters(), model.parameters()):
        average.lerp_(p, 1 - DECAY)


for step, (x, y) in enumerate(loader):
    if step == 4:
        break
    optimizer.zero_grad()
    logits = model(x)
    with torch.no_grad():
        target = teacher(x).softmax(-1)
    distill = F.kl_div(logits.log_softmax(-1), target, reduction="batchmean")
    loss = F.cross_entropy(logits, y) + 2.0 * distill
    loss.backward()
    optimizer.step()
    update_teacher()
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f}")
if rank == 0:
    torch.save(teacher.state_dict(), "/dev/null")  # the teacher is what we ship
dist.destroy_process_group()
