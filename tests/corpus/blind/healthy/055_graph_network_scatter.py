"""Message passing on small graphs by index_add, graphs of a batch flattened with offsets."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import colonnade
import common

rank, world = common.start()


class MessagePassing(nn.Module):
    def __init__(self):
        super().__init__()
        self.message, self.update, self.head = nn.Linear(8, 8), nn.Linear(12, 4), nn.Linear(4, 2)

    def forward(self, nodes, edges):
        batch, count, width = nodes.shape
        offset = torch.arange(batch).view(-1, 1, 1) * count
        source, goal = (edges + offset).flatten(0, 1).unbind(1)
        x = nodes.flatten(0, 1)
        for _ in range(2):
            sent = F.relu(self.message(torch.cat([x[source], x[goal]], 1)))
            received = torch.zeros(len(x), 8, dtype=x.dtype).index_add(0, goal, sent)
            x = torch.tanh(self.update(torch.cat([x, received], 1)))
        return self.head(x.view(batch, count, -1).mean(1))


net = MessagePassing()
common.plant(net.message.weight)
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = common.loader(common.draw(24, 5, 4), common.ints(5, 24, 9, 2), common.ints(2, 24, seed=3))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)
for nodes, edges, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(nodes, edges), y)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
