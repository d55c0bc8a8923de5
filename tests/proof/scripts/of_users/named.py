"""A loop on an engine whose schedule is named by a string and whose model is copied; "uneven" gives rank 0 a batch
more, "engine" computes the passes of a step from the number of ranks, "compiled" compiles the model.
"""

import copy
import os
import sys

import torch
from torch import nn

import colonnade
from colonnade.engine.schedule import BaseSchedule
from colonnade.registry import SCHEDULE


@SCHEDULE.register_module
class Mine(BaseSchedule):
    """One pass."""

    def forward_back_step(self, engine, data_iter, forward_only=False, return_loss=True, return_output_label=True):
        x, y = self.load_batch(data_iter)
        output = engine(x)
        loss = engine.criterion(output, y)
        if not forward_only:
            engine.backward(loss)
        return output, y, loss.detach()


ranks = int(os.environ["WORLD_SIZE"])
accumulation = 4 // ranks if "engine" in sys.argv else 1
gpc = colonnade.launch(
    {"schedule": "Mine", "gradient_accumulation": accumulation, "warmup": 8 // ranks, "make": lambda: 0}, verbose=False
)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
if "compiled" in sys.argv:
    model.compile(backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = colonnade.initialize(model, optimizer, nn.MSELoss())
average = copy.deepcopy(engine.model)
draw = torch.Generator().manual_seed(1 + gpc.get_global_rank())
batches = [(torch.randn(4, 4, generator=draw), torch.randn(4, 2, generator=draw)) for _ in range(8)]
if "uneven" in sys.argv:
    for x, y in engine.batches(batches[: 2 - gpc.get_global_rank()]):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
for batch in batches:
    engine.zero_grad()
    engine.execute_schedule(iter((batch,)))
    with torch.no_grad():
        average(batch[0])
    engine.step()
