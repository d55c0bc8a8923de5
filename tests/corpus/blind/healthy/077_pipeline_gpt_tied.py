"""The library's GPT with tied embeddings over two pipeline stages, GPipe, ragged micro-batches."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from colonnade import ParallelMode
from colonnade.models import GPT
from torch.utils.data import TensorDataset

config = dict(parallel=dict(pipeline=2), schedule=dict(type="GPipe", num_microbatches=3), clip_grad_norm=0.5)
gpc = colonnade.launch(config, verbose=False)
torch.manual_seed(0)
model = GPT(20, 16, 12, 2, 2)
criterion = model.criterion()
stages = colonnade.split(model, num_stages=2)
engine, *_ = colonnade.initialize(stages, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), criterion)
if gpc.is_first_rank(ParallelMode.PIPELINE):
    common.plant(next(engine.model.parameters()))
tokens = common.ints(20, 24, 9)
batches = iter(get_dataloader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=8))
for step in range(3):
    engine.zero_grad()
    engine.execute_schedule(batches)
    engine.step()
gpc.destroy()
