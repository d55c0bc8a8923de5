"""A planned handler for one layer only, with small buckets; the built-in handler does the rest."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from colonnade import ParallelMode
from colonnade.engine.gradient_handler import PlannedGradientHandler
from colonnade.registry import GRADIENT_HANDLER
from torch.utils.data import TensorDataset

@GRADIENT_HANDLER.register_module
class Head079(PlannedGradientHandler):
    def reductions(self):
        if self.context.data_parallel_size == 1:
            return []
        return self.over(ParallelMode.DATA, "2.*")


gpc = colonnade.launch(dict(gradient_handler=[dict(type="Head079", bucket_mb=0.001)]), verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.ELU(), nn.Linear(12, 4))
common.plant(model[0].weight)
engine, *_ = colonnade.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
for epoch in range(2):
    for x, y in get_dataloader(TensorDataset(common.draw(16, 6), common.ints(4, 16)), batch_size=4):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
gpc.destroy()
