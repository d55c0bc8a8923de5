"""The trainer with loss and accuracy hooks, an evaluation after each epoch, uneven last batch."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from torch.utils.data import TensorDataset
from colonnade.trainer import Trainer, hooks

gpc = colonnade.launch(dict(clip_grad_norm=1.0), verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
common.plant(model[0].weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
engine, *_ = colonnade.initialize(model, optimizer, nn.CrossEntropyLoss())
points = common.draw(20, 6)
data = TensorDataset(points, points[:, :3].argmax(1))
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
Trainer(engine).fit(
    get_dataloader(data, batch_size=4, shuffle=True),
    epochs=2,
    test_dataloader=get_dataloader(data, batch_size=4),
    hooks=[
        hooks.LossHook(),
        hooks.AccuracyHook(),
        hooks.LRSchedulerHook(schedule, by_epoch=False),
        hooks.LogMetricByEpochHook(),
    ],
)
gpc.destroy()
