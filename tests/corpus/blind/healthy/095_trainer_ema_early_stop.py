"""The trainer with an EMA of the weights, evaluations every second step, and early stopping."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from colonnade.trainer import BaseHook, Trainer, hooks
from torch.utils.data import TensorDataset

class Confidence(BaseHook):
    def after_train_iter(self, trainer, output, label, loss):
        trainer.log({"confidence": output.detach().softmax(-1).amax(-1).mean()})


gpc = colonnade.launch(dict(clip_grad_norm=1.0, gradient_accumulation=2), verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 3))
common.plant(model[0].weight)
engine, *_ = colonnade.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), nn.CrossEntropyLoss())
points = common.draw(48, 6)
data = TensorDataset(points, points[:, :3].argmax(1))
held = TensorDataset(points[:8] + 0.1, points[:8, :3].argmax(1))
Trainer(engine).fit(
    get_dataloader(data, batch_size=4, shuffle=True),
    max_steps=4,
    hooks=[
        hooks.LossHook(),
        hooks.EMAHook(decay=0.9),
        hooks.EvaluateHook(get_dataloader(held, batch_size=4), interval=2),
        hooks.EarlyStopHook("Loss", patience=2),
        Confidence(),
    ],
)
gpc.destroy()
