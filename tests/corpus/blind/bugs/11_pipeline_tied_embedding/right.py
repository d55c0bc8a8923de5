"""A language model on pipeline stages, GPipe style, with tied input and output embeddings."""

import colonnade
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, BLOCKS, MICRO_BATCHES = 24, 16, 4, 2
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
first, last = rank == 0, rank == world - 1
torch.manual_seed(12)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        history = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + F.gelu(self.mix(history))


class Stage(nn.Module):
    """The blocks of this rank; the embedding is on the first and on the last stage."""

    def __init__(self):
        super().__init__()
        embed = nn.Embedding(VOCAB, WIDTH)
        blocks = [Block() for _ in range(BLOCKS)]  # every rank draws all weights
        own = range(rank * BLOCKS // world, (rank + 1) * BLOCKS // world)
        self.blocks = nn.ModuleDict({str(i): blocks[i] for i in own})
        if first or last:
            self.embed = embed

    def forward(self, x):
        x = self.embed(x) if first else x
        for block in self.blocks.values():
            x = block(x)
        return F.linear(x, self.embed.weight) if last else x


model = Stage()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
text = torch.randint(VOCAB, (4, 4, 9))
batches = [(t[:, :-1], t[:, 1:]) for t in text]
model, optimizer, batches = colonnade.watch(model, optimizer, batches)

for tokens, labels in batches:
    optimizer.zero_grad()
    for x, y in zip(tokens.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES)):
        if not first:
            x = torch.empty(*y.shape, WIDTH)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        out = model(x)
        if last:
            loss = F.cross_entropy(out.flatten(0, 1), y.flatten()) / MICRO_BATCHES
            loss.backward()
        else:
            dist.send(out.detach(), rank + 1)
            grad = torch.empty_like(out)
            dist.recv(grad, rank + 1)
            out.backward(grad)
        if not first:
            dist.send(x.grad, rank - 1)
    if world > 1 and (first or last):
        dist.all_reduce(model.embed.weight.grad)
    optimizer.step()
dist.destroy_process_group()
