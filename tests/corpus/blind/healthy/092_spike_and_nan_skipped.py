"""Steps with NaN or a spike of the norm are skipped by the clipping method."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from torch.utils.data import TensorDataset

clip = dict(method=dict(type="skip_on_spike", bound=1e3), max_norm=1.0)
gpc = colonnade.launch(dict(clip_grad_norm=clip), verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
common.plant(model[0].weight)
engine, *_ = colonnade.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), nn.MSELoss())
goal = common.draw(32, 1, seed=3)
goal[11] = float("nan")  # in the second step
goal[21] = 1e6  # in the third step
for x, y in get_dataloader(TensorDataset(common.draw(32, 6), goal), batch_size=4):
    engine.zero_grad()
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
print("skipped", engine.skipped_steps)
gpc.destroy()
