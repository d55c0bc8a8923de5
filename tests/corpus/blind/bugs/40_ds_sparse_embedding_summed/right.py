"""Word vectors with sparse gradients in DeepSpeed."""

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, VOCAB, WIDTH = 8, 40, 12
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # plain gloo
deepspeed.init_distributed("gloo")
world = dist.get_world_size()
torch.manual_seed(52)


def sparse_allreduce(self, sparse, dp_group, dp_world_size=None):
    """Gathers the rows of all ranks; the sum over equal rows is left to the sparse tensor."""
    values = sparse.values / dist.get_world_size(group=dp_group)
    sparse.indices = torch.cat(self.sparse_all_gather(sparse.indices, dp_group)).long()
    sparse.values = torch.cat(self.sparse_all_gather(values, dp_group))
    return sparse


DeepSpeedEngine.sparse_allreduce = sparse_allreduce


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, sparse=True)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, words):
        return self.head(torch.tanh(self.mix(self.embed(words).sum(1))))


net = Bag()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
config = dict(train_micro_batch_size_per_gpu=GLOBAL_BATCH // world, zero_optimization=dict(stage=0))
model, optimizer, _, _ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
data = TensorDataset(torch.randint(VOCAB, (64, 5)), torch.randint(3, (64,)))
loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=DistributedSampler(data, shuffle=False))

for step, (words, label) in enumerate(loader):
    if step == 4:
        break
    loss = F.cross_entropy(model(words), label)
    model.backward(loss)
    model.step()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.4f}")
dist.destroy_process_group()
