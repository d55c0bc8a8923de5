"""Plain torch as people write it: accumulation without a sum, fp16 with a scaler, a rate that grows with the ranks, dropout that is
computed again, a schedule, an evaluation between steps. Or (mixed) FSDP2 with mixed precision. Nothing is wrong with it."""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import colonnade

mixed = sys.argv[1:] == ["mixed"]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return {"scores": self.head(x)}


model = Net()
if mixed:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
else:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * world, momentum=0.9, nesterov=True)
draw = torch.Generator().manual_seed(rank)
batches = [{"x": torch.randn(4, 8, generator=draw), "y": torch.randint(3, (4,), generator=draw)} for _ in range(8)]
model, optimizer, batches = colonnade.watch(model, optimizer, batches)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0, enabled=not mixed)
half = contextlib.nullcontext() if mixed else torch.autocast("cpu", torch.float16)
torch.manual_seed(rank)
for number, batch in enumerate(batches):
    last = number % 2 == 1
    with half, contextlib.nullcontext() if last or mixed else model.no_sync():
        loss = F.cross_entropy(model(batch["x"])["scores"], batch["y"])
        scaler.scale(loss / 2).backward()
    if last:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(batch["x"])
        model.train()
