"""Context parallel training of a small LM on packed documents: every rank holds a part of each sequence."""

import colonnade
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

EOS, VOCAB, WIDTH, LENGTH = 0, 32, 16, 24
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(world, 1)[rank].contiguous()


class PackedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        position = torch.arange(tokens.shape[1])
        local = tokens.chunk(world, 1)[rank]
        mine = (local == EOS).cumsum(1)
        doc = GatherSequence.apply(mine)
        x = self.embed(local)
        q, k, v = self.qkv(x).chunk(3, -1)
        k, v = GatherSequence.apply(k), GatherSequence.apply(v)
        same = mine[:, :, None] == doc[:, None, :]
        causal = position.chunk(world)[rank][:, None] >= position
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=same & causal))
        return self.head(x)


tokens = torch.randint(1, VOCAB, (4, 4, LENGTH + 1))
tokens[torch.rand(tokens.shape) < 0.2] = EOS
batches = [(t[:, :-1], t[:, 1:]) for t in tokens]  # every rank reads the whole sequences
model = PackedLM()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, batches = colonnade.watch(model, optimizer, batches)

for inputs, labels in batches:
    optimizer.zero_grad()
    logits = model(inputs)
    loss = (
        F.cross_entropy(logits.flatten(0, 1), labels.chunk(world, 1)[rank].flatten(), reduction="sum") / labels.numel()
    )
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
dist.destroy_process_group()
