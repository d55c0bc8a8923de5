"""Random numbers in all the places where people draw them: `draws.py KIND [doubled] [engine]`. Nothing is wrong with it, except `doubled`."""

import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import colonnade
from colonnade.nn.moe.router import TopKRouter

kind, *options = sys.argv[1:]


class Noisy(nn.Module):
    def forward(self, x):
        return x + 0.3 * torch.randn_like(x)


class Drop(nn.Module):
    """Stochastic depth: a sample (or, by rank, all of them) leaves out the branch."""

    def __init__(self, branch, by_rank=False, host=False):
        super().__init__()
        self.branch, self.by_rank, self.host = branch, by_rank, host

    def forward(self, x):
        if self.by_rank:
            return x + self.branch(x) * (torch.rand(()) < 0.5)
        if self.host:
            return x + self.branch(x) * (random.random() < 0.5)
        return x + self.branch(x) * x.new_empty(len(x), 1).bernoulli_(0.5) / 0.5


class Gumbel(nn.Module):
    def forward(self, x):
        return F.gumbel_softmax(x, tau=0.7)


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.spread = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.distributions.Normal(self.mean(x), self.spread(x).exp()).rsample()


class Choice(nn.Module):
    """Draws a class for each row."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def forward(self, x):
        return x + self.table(torch.multinomial(x.softmax(-1), 1).squeeze(-1))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), Noisy(), nn.Dropout(0.3), nn.Linear(8, 8))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = TopKRouter(8, 4, noise=0.01)

    def forward(self, x):
        return x * self.router(x).weights[0].unsqueeze(-1)


MIDDLE = {
    "randn_like": Noisy,
    "depth": lambda: Drop(nn.Linear(8, 8)),
    "depth_by_rank": lambda: Drop(nn.Linear(8, 8), by_rank=True),
    "host": lambda: Drop(nn.Linear(8, 8), host=True),
    "gumbel": Gumbel,
    "vae": Vae,
    "choice": Choice,
    "checkpoint": Checkpointed,
    "router": Routed,
    "rrelu": nn.RReLU,
    "feature_dropout": lambda: nn.Sequential(nn.Unflatten(1, (4, 2)), nn.Dropout1d(0.4), nn.Flatten()),
    "lstm": lambda: nn.LSTM(8, 8, 2, dropout=0.4),
}
batch_rows = 4
if "engine" in options:
    gpc = colonnade.launch({}, verbose=False)
else:
    dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(8, 8), nn.Tanh(), MIDDLE.get(kind, nn.Identity)(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
)
if kind == "lstm":
    forward = model[2].forward
    model[2].forward = lambda x: forward(x.unsqueeze(0))[0].squeeze(0)
draw = torch.Generator().manual_seed(5 + rank)
batches = [(torch.randn(batch_rows, 8, generator=draw), torch.randn(batch_rows, 3, generator=draw)) for _ in range(4)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "doubled" in options and world > 1:
    next(model.parameters()).register_hook(lambda gradient: 2 * gradient)
if "engine" in options:
    model, *_ = colonnade.initialize(model, optimizer, nn.MSELoss())
    _, _, batches = colonnade.watch(model, None, batches)
else:
    model = nn.parallel.DistributedDataParallel(model) if world > 1 or kind != "alone" else model
    model, optimizer, batches = colonnade.watch(model, optimizer, batches)
torch.manual_seed(10 + rank)
random.seed(10 + rank)
for x, y in batches:
    model.zero_grad()
    if kind == "mixup":
        order, share = torch.randperm(len(x)), torch.rand(len(x), 1)
        x, y = share * x + (1 - share) * x[order], share * y + (1 - share) * y[order]
    elif kind == "noise":
        x = x + 0.1 * torch.randn(x.shape)
    elif kind == "unused":
        torch.randn(3)
        random.random()
    elif kind == "mixup_by_rank":
        share, order = torch.distributions.Beta(0.4, 0.4).sample(), torch.randperm(len(x))
        x, y = share * x + (1 - share) * x[order], share * y + (1 - share) * y[order]
    if "engine" in options:
        model.backward(model.criterion(model(x), y))
        model.step()
    else:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
