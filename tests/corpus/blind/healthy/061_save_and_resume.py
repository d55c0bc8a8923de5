"""Saves a checkpoint after the first steps, builds model and optimizer again, and resumes from it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
import tempfile
from pathlib import Path

rank, world = common.start()


def build():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
    common.plant(net[0].weight)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return net, DDP(net), optimizer


net, model, optimizer = build()
loader = common.loader(common.draw(32, 6), common.ints(2, 32))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
folder = Path(tempfile.gettempdir()) / f"blind-resume-{world}"
folder.mkdir(exist_ok=True)
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    if step == 0:
        if rank == 0:
            torch.save(dict(net=net.state_dict(), optimizer=optimizer.state_dict()), folder / "last.pt")
        dist.barrier()
        saved = torch.load(folder / "last.pt")
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
dist.destroy_process_group()
