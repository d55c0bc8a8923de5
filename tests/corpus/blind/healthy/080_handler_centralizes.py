"""A handler that changes reduced gradients: gradient centralization (the mean of each row becomes 0)."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from colonnade.engine.gradient_handler import BaseGradientHandler
from colonnade.registry import GRADIENT_HANDLER
from torch.utils.data import TensorDataset

@GRADIENT_HANDLER.register_module
class Centralize080(BaseGradientHandler):
    def covers(self):
        return []  # performs no reduction; the built-in handlers do

    def handle_gradient(self):
        for parameter in self._model.parameters():
            if parameter.grad is not None and parameter.ndim > 1:
                parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))


gpc = colonnade.launch(dict(gradient_handler=["Centralize080"]), verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
common.plant(model[0].weight)
engine, *_ = colonnade.initialize(model, torch.optim.SGD(model.parameters(), lr=0.2), nn.CrossEntropyLoss())
for x, y in get_dataloader(TensorDataset(common.draw(24, 6), common.ints(3, 24)), batch_size=4):
    engine.zero_grad()
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
gpc.destroy()
