"""A handler of its own that all-reduces the gradients one by one, in reverse order."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
import torch.distributed as dist
from colonnade import ParallelMode
from colonnade.engine.gradient_handler import BaseGradientHandler
from colonnade.registry import GRADIENT_HANDLER
from torch.utils.data import TensorDataset

@GRADIENT_HANDLER.register_module
class OneByOne078(BaseGradientHandler):
    def handle_gradient(self):
        group, size = self.context.get_group(ParallelMode.DATA), self.context.data_parallel_size
        for parameter in reversed(list(self._model.parameters())):
            if size > 1:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= size


gpc = colonnade.launch(dict(gradient_handler=["OneByOne078"]), verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
common.plant(model[0].weight)
engine, *_ = colonnade.initialize(model, torch.optim.RAdam(model.parameters(), lr=1e-2), nn.SmoothL1Loss())
for x, y in get_dataloader(TensorDataset(common.draw(24, 6), common.draw(24, 2, seed=3)), batch_size=4):
    engine.zero_grad()
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
gpc.destroy()
