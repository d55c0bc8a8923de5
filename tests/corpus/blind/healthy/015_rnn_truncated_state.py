"""GRU language model with truncated backpropagation: the hidden state is carried from batch to batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(11, 8), nn.GRU(8, 12, batch_first=True), nn.Linear(12, 11)

    def forward(self, tokens, state):
        y, state = self.cell(self.words(tokens), state)
        return self.head(y), state


net = Stream()
common.plant(next(net.parameters()))
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
text = common.ints(11, 8, 19)
mine = text[rank * 4 : rank * 4 + 4] if world > 1 else text
pieces = [mine[:, at : at + 7] for at in (0, 6, 12)]
model, optimizer, pieces = colonnade.watch(model, optimizer, pieces)
state = None
for piece in pieces:
    if state is None:
        state = torch.zeros(1, len(piece), 12, dtype=net.head.weight.dtype)
    logits, state = model(piece[:, :-1], state.detach())
    loss = F.cross_entropy(logits.transpose(1, 2), piece[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
dist.destroy_process_group()
