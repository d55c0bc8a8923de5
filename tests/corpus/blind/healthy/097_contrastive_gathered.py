"""NT-Xent contrastive loss with two noisy views and the features of all data ranks (all_gather)."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from colonnade import ParallelMode
from colonnade.parallel.collectives import all_gather
from torch.utils.data import TensorDataset

gpc = colonnade.launch(dict(clip_grad_norm=1.0), verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
common.plant(model[0].weight)
engine, *_ = colonnade.initialize(model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
rank = gpc.get_global_rank()
torch.manual_seed(240 + rank)
for (x,) in get_dataloader(TensorDataset(common.draw(24, 8)), batch_size=4):
    first = F.normalize(engine(x + 0.1 * torch.randn_like(x)), dim=1)
    second = F.normalize(engine(x + 0.1 * torch.randn_like(x)), dim=1)
    candidates = all_gather(second, ParallelMode.DATA, dim=0)
    labels = torch.arange(len(x)) + rank * len(x)
    loss = F.cross_entropy(first @ candidates.T / 0.5, labels)
    engine.zero_grad()
    engine.backward(loss)
    engine.step()
gpc.destroy()
