"""Linear warm-up and decay with Accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH, WARMUP, STEPS = 16, 4, 12
accelerator = Accelerator(cpu=True)
set_seed(27)


def warmup_and_decay(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return max(0.0, (STEPS - step) / (STEPS - WARMUP))


net = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 4))
data = TensorDataset(torch.randn(192, 12), torch.randint(4, (192,)))
loader = DataLoader(data, batch_size=GLOBAL_BATCH // accelerator.num_processes)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
scheduler = LambdaLR(optimizer, warmup_and_decay)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)

for step, (x, y) in enumerate(loader):
    if step == 4:
        break
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    accelerator.print(f"step {step} loss {loss.item():.3f} lr {scheduler.get_last_lr()[0]:.4f}")
accelerator.end_training()
