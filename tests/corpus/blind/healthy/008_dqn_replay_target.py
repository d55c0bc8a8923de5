"""DQN: a replay buffer of each rank, random minibatches from it, a target network by soft updates."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common
import copy

rank, world = common.start()
net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
target = copy.deepcopy(net).requires_grad_(False)
common.plant(net[0].weight)
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
states, rewards = common.draw(24, 4), common.draw(24, seed=5)
loader = common.loader(states, common.ints(3, 24), rewards, states.roll(-1, 0))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
torch.manual_seed(30 + rank)
memory = []
for batch in loader:
    memory = (memory + [batch])[-2:]
    seen = [torch.cat(column) for column in zip(*memory)]
    chosen = torch.randint(0, len(seen[0]), (len(batch[0]),))
    state, action, reward, following = (column[chosen] for column in seen)
    with torch.no_grad():
        goal = reward + 0.9 * target(following).amax(1)
    value = model(state).gather(1, action.unsqueeze(1)).squeeze(1)
    optimizer.zero_grad()
    F.smooth_l1_loss(value, goal).backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), net.parameters()):
            slow.lerp_(fast, 0.1)
dist.destroy_process_group()
