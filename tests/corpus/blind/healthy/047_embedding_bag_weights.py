"""EmbeddingBag with weights per sample for recommendation, plus a wide linear part."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(40, 8, mode="sum")
        self.item = nn.Embedding(10, 8)
        self.wide = nn.Linear(3, 1)

    def forward(self, history, weight, item, dense):
        user = self.bag(history, per_sample_weights=weight)
        return (user * self.item(item)).sum(1) + self.wide(dense).squeeze(1)


net = Recommender()
common.plant(net.bag.weight)
model = DDP(net)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
loader = common.loader(
    common.ints(40, 24, 6),
    torch.rand(24, 6, generator=torch.Generator().manual_seed(4)),
    common.ints(10, 24, seed=5),
    common.draw(24, 3),
    common.ints(2, 24, seed=6).float(),
)
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for history, weight, item, dense, clicked in loader:
    scores = model(history, weight, item, dense)
    loss = F.binary_cross_entropy_with_logits(scores, clicked.to(scores.dtype))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
