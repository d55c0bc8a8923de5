"""A schedule of its own: each batch runs twice, plain and with noise, and both views shall agree."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from colonnade.engine.schedule import BaseSchedule
from colonnade.registry import SCHEDULE
from torch.utils.data import TensorDataset

@SCHEDULE.register_module
class TwoViews088(BaseSchedule):
    def forward_back_step(
        self, engine, data_iter, forward_only=False, return_loss=True, return_output_label=True
    ):
        data, label = self.load_batch(data_iter)
        plain, noisy = engine(data), engine(data + 0.1 * torch.randn_like(data))
        loss = engine.criterion(plain, label) + 0.5 * (plain - noisy).square().mean()
        if not forward_only:
            engine.backward(loss)
        return plain, label, loss.detach()


gpc = colonnade.launch(dict(schedule="TwoViews088"), verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
common.plant(model[0].weight)
engine, *_ = colonnade.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())
torch.manual_seed(230 + gpc.get_global_rank())
batches = iter(get_dataloader(TensorDataset(common.draw(24, 6), common.draw(24, 2, seed=3)), batch_size=4))
for step in range(3):
    engine.zero_grad()
    engine.execute_schedule(batches)
    engine.step()
gpc.destroy()
