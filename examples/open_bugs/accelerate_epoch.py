"""accelerate #4071: a resumed run starts again with the shuffling of the first epoch.

The script saves with `Accelerator.save_state` after each step, and resumes with `load_state` and `skip_first_batches`, like the documentation of
Accelerate. Its argument is the folder of the checkpoints.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

folder = Path(sys.argv[1])
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
set_seed(1)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(32, 6), torch.randn(32, 2)), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
done = len(list(folder.glob("step*")))
if done:
    accelerator.load_state(str(folder / f"step{done}"))
for epoch in range(done // len(loader), 3):
    skipped = done - epoch * len(loader)
    batches = accelerator.skip_first_batches(loader, skipped) if skipped > 0 else loader
    for x, y in batches:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        done += 1
        accelerator.save_state(str(folder / f"step{done}"))
