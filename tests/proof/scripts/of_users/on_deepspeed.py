"""A script on DeepSpeed without any line for `verify`: the stage of ZeRO, and what is unusual or wrong."""

import sys

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

stage, kind = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
config = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.1,
    "zero_optimization": {"stage": stage},
    "bf16": {"enabled": kind == "bf16"},
    "zero_allow_untested_optimizer": True,
}
deepspeed.init_distributed(dist_backend="gloo")
world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 2))
for number, (x, y) in enumerate(DataLoader(data, batch_size=4, sampler=DistributedSampler(data))):
    loss = nn.functional.mse_loss(engine(x.to(next(model.parameters()).dtype)), y)
    if kind == "doubled":
        loss = loss * world
    if kind == "half_rank" and rank == 1:
        loss = loss * 0.5
    if kind == "lost_pass" and rank == 1 and number % 2 == 0:
        loss = loss * 0.0
    engine.backward(loss)
    engine.step()
