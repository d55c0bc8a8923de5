"""A small mixture of experts with an auxiliary load balancing loss, trained with Accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH, EXPERTS, WIDTH = 16, 4, 12
accelerator = Accelerator(cpu=True)
set_seed(29)


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 5)

    def forward(self, x):
        probability = self.router(x).softmax(-1)
        chosen = F.one_hot(probability.argmax(-1), EXPERTS).to(x)
        hidden = F.silu(torch.einsum("tw,ewh->teh", x, self.up))
        out = torch.einsum("teh,ehw,te->tw", hidden, self.down, probability * chosen)
        fraction = chosen.mean(0)
        balance = EXPERTS * (fraction * probability.mean(0)).sum()
        return x + out, balance


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.moe, self.out = nn.Linear(8, WIDTH), MoE(), nn.Linear(WIDTH, 3)

    def forward(self, x):
        h, balance = self.moe(self.inp(x))
        return self.out(h), balance


net = Net()
data = TensorDataset(torch.randn(96, 8), torch.randint(3, (96,)))
loader = DataLoader(data, batch_size=GLOBAL_BATCH // accelerator.num_processes)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)

for step, (x, y) in enumerate(loader):
    if step == 4:
        break
    optimizer.zero_grad()
    logits, balance = model(x)
    accelerator.backward(F.cross_entropy(logits, y) + 0.5 * balance)
    optimizer.step()
accelerator.end_training()
