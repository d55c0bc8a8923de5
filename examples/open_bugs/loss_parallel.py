"""pytorch #190746: inside `loss_parallel()`, a `log_softmax` that does not feed `nll_loss` gets the identity as its gradient.

The loss is cross-entropy plus a confidence term on the log-probabilities. In one process nothing is sharded, and the block is left out.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.functional import cross_entropy, log_softmax

import colonnade

dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8))
if world > 1:
    mesh = init_device_mesh("cpu", (world,))
    last = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
    model = parallelize_module(model, mesh, {"2": last})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [(torch.randn(4, 6), torch.randint(8, (4,))) for _ in range(3)]
model, optimizer, batches = colonnade.watch(model, optimizer, batches)
for x, y in batches:
    optimizer.zero_grad()
    with loss_parallel() if world > 1 else nullcontext():
        scores = model(x)
        loss = cross_entropy(scores, y)
        if world > 1:
            loss = loss.full_tensor()
        confidence = log_softmax(scores, -1).square().mean()
        if world > 1:
            confidence = confidence.full_tensor()
        (loss + confidence).backward()
    optimizer.step()
