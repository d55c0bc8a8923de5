"""CLIP-like symmetric loss with a learned temperature that is clamped after each step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
from torch.distributed.nn.functional import all_gather

rank, world = common.start()


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(8, 6), nn.Linear(5, 6)
        self.scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1), self.scale.exp()


net = TwoTowers()
common.plant(next(net.parameters()))
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
loader = common.loader(common.draw(24, 8), common.draw(24, 5, seed=4))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for image, text in loader:
    optimizer.zero_grad()
    i, t, scale = model(image, text)
    if world > 1:
        all_i, all_t = torch.cat(all_gather(i, dist.group.WORLD)), torch.cat(all_gather(t, dist.group.WORLD))
    else:
        all_i, all_t = i, t
    labels = torch.arange(len(i)) + rank * len(i)
    loss = (F.cross_entropy(scale * i @ all_t.T, labels) + F.cross_entropy(scale * t @ all_i.T, labels)) / 2
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        net.scale.clamp_(0.0, 1.22)
dist.destroy_process_group()
