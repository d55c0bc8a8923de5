"""An autoencoder whose parts are called one by one, with Accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH = 8
accelerator = Accelerator(cpu=True)
set_seed(25)


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 24), nn.GELU(), nn.Linear(24, 16))

    def encode(self, x):
        return self.encoder(x)

    def decode(self, code):
        return self.decoder(code)

    def forward(self, x):
        code = self.encode(x)
        return self.decode(code), code


data = TensorDataset(torch.randn(64, 16))
loader = DataLoader(data, batch_size=GLOBAL_BATCH // accelerator.num_processes)
net = AutoEncoder()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)

for step, (x,) in enumerate(loader):
    if step == 4:
        break
    optimizer.zero_grad()
    output, code = model(x)
    loss = F.mse_loss(output, x) + 0.01 * code.abs().mean()
    accelerator.backward(loss)
    optimizer.step()
accelerator.end_training()
