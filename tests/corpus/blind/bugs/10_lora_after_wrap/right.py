"""LoRA fine-tuning under DDP: the base is frozen, adapters and a new head are trained."""

import colonnade
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, RANK_OF_ADAPTER = 8, 2
dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(11)


class LoraLinear(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(RANK_OF_ADAPTER, base.in_features) / 4)
        self.lora_b = nn.Parameter(torch.randn(base.out_features, RANK_OF_ADAPTER) / 10)

    def forward(self, x):
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


def add_lora(net):
    for layer in net.layers:
        layer.proj = LoraLinear(layer.proj)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.proj(x))


class Classifier(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.Sequential(Layer(width), Layer(width))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        return self.head(self.layers(x))


net = Classifier()
net.layers.requires_grad_(False)  # pretrained
add_lora(net)
model = DDP(net)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
data = TensorDataset(torch.randn(48, 16), torch.randint(4, (48,)))
loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=DistributedSampler(data, shuffle=False))
model, optimizer, loader = colonnade.watch(model, optimizer, loader)

for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
