"""A script on Accelerate without any line for `verify`; an argument names what is unusual or wrong."""

import sys
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

kind = sys.argv[1]
torch.manual_seed(0)
accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=2,
    mixed_precision="bf16" if kind == "bf16" else "no",
    dataloader_config=DataLoaderConfiguration(dispatch_batches=kind == "dispatched"),
)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
loader = DataLoader(TensorDataset(torch.randn(128, 8), torch.randn(128, 2)), batch_size=4, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for x, y in loader:
    with accelerator.accumulate(model), accelerator.no_sync(model) if kind == "unsynced" else nullcontext():
        loss = nn.functional.mse_loss(model(x), y)
        if kind == "doubled":
            loss = loss * accelerator.num_processes
        if kind == "half_rank" and accelerator.process_index == 1:
            loss = loss * 0.5
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
