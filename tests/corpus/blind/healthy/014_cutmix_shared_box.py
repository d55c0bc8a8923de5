"""CutMix with one box for a batch, drawn by a generator with the same seed on every rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()
net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = common.loader(common.draw(24, 1, 6, 6), common.ints(3, 24))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
shared = torch.Generator().manual_seed(5)
for x, y in loader:
    top, left = torch.randint(0, 4, (2,), generator=shared).tolist()
    size = int(torch.randint(1, 4, (1,), generator=shared))
    mixed = x.clone()
    # each image and its mirror image: the partner does not depend on the number of ranks
    mixed[:, :, top : top + size, left : left + size] = x.flip(-1)[:, :, top : top + size, left : left + size]
    share = 1 - min(size, 6 - top) * min(size, 6 - left) / 36
    logits = model(mixed)
    loss = share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, (y + 1) % 3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
