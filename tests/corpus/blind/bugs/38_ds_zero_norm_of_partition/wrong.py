"""ZeRO-1 of DeepSpeed on CPU ranks, with gradient clipping."""

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 16
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # plain gloo
deepspeed.init_distributed("gloo")
world = dist.get_world_size()
torch.manual_seed(50)


def get_grad_norm_direct(self, gradients, params, norm_type=2):
    """L2 norm of the full gradient; every rank holds a partition of it."""
    square = sum((g.detach().square().sum() for g in gradients), torch.zeros(()))
    return square.sqrt().float()


DeepSpeedZeroOptimizer.get_grad_norm_direct = get_grad_norm_direct

net = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 5))
optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
config = dict(
    train_micro_batch_size_per_gpu=GLOBAL_BATCH // world,
    gradient_clipping=0.2,
    zero_optimization=dict(stage=1),
    zero_allow_untested_optimizer=True,
)
model, optimizer, _, _ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
data = TensorDataset(torch.randn(64, 12), torch.randint(5, (64,)))
loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=DistributedSampler(data, shuffle=False))

for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    model.step()
dist.destroy_process_group()
