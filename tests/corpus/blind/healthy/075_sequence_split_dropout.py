"""Megatron's sequence parallelism (sequence_split) with dropout between the tensor-parallel layers."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
from colonnade.nn import Classifier, CrossEntropyLoss, Dropout, Embedding, LayerNorm, Linear
from torch.utils.data import TensorDataset

tensor = dict(size=2, mode="1d", sequence_split=True)
gpc = colonnade.launch(dict(parallel=dict(tensor=tensor), clip_grad_norm=1.0), verbose=False)
torch.manual_seed(0)
model = nn.Sequential(
    Embedding(16, 8),
    Dropout(0.1),
    LayerNorm(8),
    Linear(8, 32),
    nn.GELU(),
    Linear(32, 8, split="row"),
    Dropout(0.1),
    Classifier(8, 16),
)
common.plant(next(model.parameters()))
engine, *_ = colonnade.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), CrossEntropyLoss())
tokens = common.ints(16, 12, 8)
for (x,) in get_dataloader(TensorDataset(tokens), batch_size=4):
    engine.zero_grad()
    engine.backward(engine.criterion(engine(x), x.roll(-1, 1)))
    engine.step()
gpc.destroy()
