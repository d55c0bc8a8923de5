"""A physics-informed network (pendulum) with an engine: second derivatives with respect to time."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from torch.utils.data import TensorDataset

gpc = colonnade.launch(dict(clip_grad_norm=1.0), verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
common.plant(model[0].weight)
engine, *_ = colonnade.initialize(model, torch.optim.Adam(model.parameters(), lr=5e-3))
times = torch.linspace(0, 2, 24).unsqueeze(1)
for (t,) in get_dataloader(TensorDataset(times), batch_size=4, shuffle=True):
    t = t.clone().requires_grad_()
    angle = engine(t)
    (speed,) = torch.autograd.grad(angle.sum(), t, create_graph=True)
    (acceleration,) = torch.autograd.grad(speed.sum(), t, create_graph=True)
    residual = acceleration + 9.81 * angle.sin()
    start = angle - 0.5 * torch.cos(3.13 * t)
    engine.zero_grad()
    engine.backward((residual.square() + 10 * start.square()).mean())
    engine.step()
gpc.destroy()
