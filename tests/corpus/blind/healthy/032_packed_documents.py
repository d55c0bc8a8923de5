"""Variable-length documents packed into one row, with segment masks and positions; divided by all tokens."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(17, 8), nn.Embedding(12, 8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 17)

    def forward(self, tokens, segment, position):
        x = self.words(tokens) + self.places(position)
        q, k, v = self.qkv(x).chunk(3, -1)
        same = segment.unsqueeze(2) == segment.unsqueeze(1)
        causal = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()
        return self.head(x + F.scaled_dot_product_attention(q, k, v, attn_mask=same & causal))


net = Packed()
common.plant(net.words.weight)
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens = common.ints(17, 12, 12)
segment = (common.draw(12, 12, seed=6) > 0.7).long().cumsum(1)
start = torch.where(segment != F.pad(segment, (1, 0), value=-1)[:, :-1], torch.arange(12), 0).cummax(1).values
loader = common.loader(tokens, segment, torch.arange(12) - start, batch=2)
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for tokens, segment, position in loader:
    inside = segment[:, 1:] == segment[:, :-1]
    labels = tokens[:, 1:].masked_fill(~inside, -100)
    count = inside.sum()
    dist.all_reduce(count)
    logits = model(tokens, segment, position)[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    optimizer.zero_grad()
    (loss * world / count).backward()
    optimizer.step()
dist.destroy_process_group()
