"""PPO: clipped ratios, value loss and entropy; advantages normalized by the moments of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.policy, self.value = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x):
        h = self.body(x)
        return self.policy(h).log_softmax(-1), self.value(h).squeeze(-1)


def normalized(a):
    moments = torch.stack([a.sum(), a.square().sum(), torch.tensor(float(len(a)), dtype=a.dtype)])
    dist.all_reduce(moments)
    mean = moments[0] / moments[2]
    return (a - mean) / (moments[1] / moments[2] - mean**2 + 1e-8).sqrt()


net = ActorCritic()
common.plant(net.body[0].weight)
model = DDP(net)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
old = common.draw(24, 3, seed=3).log_softmax(-1)
actions = common.ints(3, 24)
old = old.gather(1, actions[:, None]).squeeze(1)
loader = common.loader(common.draw(24, 4), actions, old, common.draw(24, seed=6), common.draw(24, seed=7), batch=6)
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for states, action, before, advantage, returns in loader:
    advantage = normalized(advantage)
    log_p, value = model(states)
    ratio = (log_p.gather(1, action[:, None]).squeeze(1) - before).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    entropy = -(log_p.exp() * log_p).sum(1)
    loss = (-gain + 0.5 * (value - returns).square() - 0.01 * entropy).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
dist.destroy_process_group()
