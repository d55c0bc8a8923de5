"""Contrastive image-text training (CLIP) with DDP; every rank scores its rows against all columns."""

import colonnade
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 12
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(6)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(20, 24), nn.GELU(), nn.Linear(24, 8))
        self.text = nn.Sequential(nn.Embedding(30, 24), nn.Flatten(), nn.Linear(24 * 5, 8))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        image = F.normalize(self.image(image), dim=-1)
        text = F.normalize(self.text(text), dim=-1)
        return image, text, self.logit_scale.exp()


def all_features(x):
    return torch.cat(all_gather(x.contiguous()))


def clip_loss(image, text, scale):
    target = torch.arange(len(image)) + rank * len(image)
    per_image = scale * image @ all_features(text).T
    per_text = scale * text @ all_features(image).T
    return (F.cross_entropy(per_image, target) + F.cross_entropy(per_text, target)) / 2


data = TensorDataset(torch.randn(48, 20), torch.randint(30, (48, 5)))
loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=DistributedSampler(data, shuffle=False))
model = DDP(TwoTowers())
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer, loader = colonnade.watch(model, optimizer, loader)

for image, text in loader:
    optimizer.zero_grad()
    loss = clip_loss(*model(image, text))
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
