"""Metric learning with Accelerate: a network and a loss with trainable prototypes."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH, CLASSES, WIDTH = 12, 5, 8
accelerator = Accelerator(cpu=True)
set_seed(23)


class PrototypeLoss(nn.Module):
    """Cosine similarity to one prototype per class (as in ArcFace, without the margin)."""

    def __init__(self):
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(CLASSES, WIDTH))
        self.scale = nn.Parameter(torch.tensor(8.0))

    def forward(self, features, labels):
        cosine = F.normalize(features, dim=-1) @ F.normalize(self.prototypes, dim=-1).T
        return F.cross_entropy(self.scale * cosine, labels)


net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, WIDTH))
criterion = PrototypeLoss()
data = TensorDataset(torch.randn(60, 10), torch.randint(CLASSES, (60,)))
loader = DataLoader(data, batch_size=GLOBAL_BATCH // accelerator.num_processes)
optimizer = torch.optim.AdamW([*net.parameters(), *criterion.parameters()], lr=1e-2)
model, criterion, optimizer, loader = accelerator.prepare(net, criterion, optimizer, loader)

for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
accelerator.end_training()
