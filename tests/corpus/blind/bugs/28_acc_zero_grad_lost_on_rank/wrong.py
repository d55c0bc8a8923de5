"""Training with Accelerate and gradient accumulation."""

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH = 8


def zero_grad(self, set_to_none=None):
    """Clears the gradients at the end of an accumulation."""
    if self.gradient_state.sync_gradients and accelerator.is_main_process:
        self.optimizer.zero_grad()


AcceleratedOptimizer.zero_grad = zero_grad  # shorter than the one of the package
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(31)

net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2))
data = TensorDataset(torch.randn(64, 10), torch.randn(64, 2))
loader = DataLoader(data, batch_size=GLOBAL_BATCH // accelerator.num_processes)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)

for x, y in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
