"""Pipeline of two stages, 1F1B with four micro-batches, a convolutional net with GroupNorm."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from colonnade import ParallelMode
from torch.utils.data import TensorDataset

gpc = colonnade.launch(dict(parallel=dict(pipeline=2), num_microbatches=4, clip_grad_norm=1.0), verbose=False)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv1d(2, 8, 3, padding=1),
    nn.GroupNorm(2, 8),
    nn.ReLU(),
    nn.Conv1d(8, 8, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(64, 3),
)
engine, *_ = colonnade.initialize(
    colonnade.split(model, num_stages=2), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), nn.CrossEntropyLoss()
)
if gpc.is_first_rank(ParallelMode.PIPELINE):
    common.plant(next(engine.model.parameters()))
batches = iter(get_dataloader(TensorDataset(common.draw(24, 2, 8), common.ints(3, 24)), batch_size=8))
for step in range(3):
    engine.zero_grad()
    _, _, loss = engine.execute_schedule(batches)
    engine.step()
    print(f"step {step}: loss {float(loss):.4f}")
gpc.destroy()
