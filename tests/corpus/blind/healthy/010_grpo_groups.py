"""GRPO: advantages normalized inside groups of samples of one prompt, KL to a frozen reference."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
import copy

rank, world = common.start()
net = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))
reference = copy.deepcopy(net).eval().requires_grad_(False)
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
tokens = common.ints(12, 16, 4, 7)  # prompt, sample of the group, position
loader = common.loader(tokens, common.draw(16, 4, seed=8), batch=2)
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for tokens, reward in loader:
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
    flat = tokens.flatten(0, 1)
    labels = flat[:, 1:].unsqueeze(-1)
    log_p = model(flat[:, :-1]).log_softmax(-1).gather(-1, labels).squeeze(-1)
    with torch.no_grad():
        log_r = reference(flat[:, :-1]).log_softmax(-1).gather(-1, labels).squeeze(-1)
    ratio = (log_p - log_p.detach()).exp()
    kl = (log_r - log_p).exp() - (log_r - log_p) - 1
    loss = -(ratio * advantage.flatten().unsqueeze(1) - 0.04 * kl).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"step: loss {loss.item():.4f}")
dist.destroy_process_group()
