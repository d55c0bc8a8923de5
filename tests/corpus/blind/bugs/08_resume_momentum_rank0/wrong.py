"""Resumes DDP training from a checkpoint of weights and AdamW state."""

import io

import colonnade
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 16
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def build():
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(14, 24), nn.SiLU(), nn.Linear(24, 3))


def old_checkpoint():
    """Stands for the file of an earlier job: weights and moments after 500 steps."""
    net = build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for p in net.parameters():
        optimizer.state[p] = dict(
            step=torch.tensor(500.0), exp_avg=torch.randn_like(p) * 0.05, exp_avg_sq=torch.rand_like(p) * 0.01
        )
    file = io.BytesIO()
    torch.save(dict(model=net.state_dict(), optimizer=optimizer.state_dict()), file)
    file.seek(0)
    return file


def resume(net, optimizer, file):
    checkpoint = torch.load(file, weights_only=True)
    net.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])


net = build()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
if rank == 0:
    resume(net, optimizer, old_checkpoint())
else:
    old_checkpoint()  # keeps the random numbers of the ranks together
model = DDP(net)  # broadcasts what rank 0 has loaded
data = TensorDataset(torch.randn(64, 14), torch.randint(3, (64,)))
loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=DistributedSampler(data, shuffle=False))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)

for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
