"""A hook of ours belongs to one model: copies and pickles of the model do without it."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from colonnade.parallel.forward import ModelHook


def test_a_hook_acts_on_its_own_model_alone() -> None:
    seen: list[int] = []
    layer = nn.Linear(2, 2)
    layer.register_forward_pre_hook(ModelHook(lambda module, args: seen.append(len(args))))
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for other in copies:
        other(torch.ones(2))
    assert seen == []
    layer(torch.ones(2))
    assert seen == [1]
