import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import colonnade

dist.init_process_group()
torch.manual_seed(0)
tokens = torch.randint(1, 64, (64, 16))
lengths = torch.randint(4, 16, (64, 1))
labels = tokens.roll(-1, 1).where(torch.arange(16) < lengths, -100)  # padding is ignored
data = TensorDataset(tokens, labels)
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
model = DDP(nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64)))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = colonnade.watch(model, optimizer, loader)

for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
