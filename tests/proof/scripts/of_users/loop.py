"""A loop on an engine, with a loader, a loss of its own, accumulation and clipping; "undivided" plants a mistake.

"fail", "hang", "early" and "idle" come to no step, "short" leaves after the first; "wide" has large tensors.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import colonnade
from colonnade.engine.gradient_handler import BaseGradientHandler
from colonnade.gradients.sums import group_reductions
from colonnade.registry import GRADIENT_HANDLER
from colonnade.utils import get_dataloader


@GRADIENT_HANDLER.register_module
class Undivided(BaseGradientHandler):
    """Says that it takes means, and sums."""

    def covers(self):
        return group_reductions((demand, factor) for demand in self.demands() for factor in demand.owed)

    def handle_gradient(self):
        for parameter in self._model.parameters():
            dist.all_reduce(parameter.grad)


handlers = {"gradient_handler": ["Undivided"]} if "undivided" in sys.argv else {}
colonnade.launch({"gradient_accumulation": 2, "clip_grad_norm": 1.0, **handlers}, verbose=False)
width = 20_000 if "wide" in sys.argv else 16
model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 4))
if "fail" in sys.argv:
    raise ValueError("this script fails by itself")
while "hang" in sys.argv:
    time.sleep(1)
if "early" in sys.argv:
    sys.exit(0)
engine, *_ = colonnade.initialize(model, torch.optim.AdamW(model.parameters(), lr=0.01))
if "idle" in sys.argv:
    sys.exit(0)
draw = torch.Generator().manual_seed(1)
rows = TensorDataset(torch.randn(64, 8, generator=draw), torch.randint(0, 4, (64,), generator=draw))
for x, y in get_dataloader(rows, shuffle=True, batch_size=4):
    engine.zero_grad()
    engine.backward(F.cross_entropy(engine(x), y))
    if engine.step() and "short" in sys.argv:
        sys.exit(0)
sys.exit("the script went on after its last step")
