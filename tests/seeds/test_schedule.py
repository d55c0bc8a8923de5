"""The last section of "Add your own parallelism": a schedule of one's own, by its documented method."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
from torch import nn

from colonnade import compat
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.registry import SCHEDULE
from tests.seeds.snippets import OWN_PARALLELISM, TEXT

SECTION = (TEXT / OWN_PARALLELISM).read_text().split("## Schedule")[1]


@pytest.mark.parametrize("root", ["colossalai", "colonnade"])
@pytest.mark.parametrize("method", [re.search(r"implement the `(\w+)` function", SECTION)[1], "forward_backward_step"])
def test_a_subclass_with_the_documented_method_is_chosen_by_config_and_runs(method, root):
    compat.install()
    path = re.search(r"`colossalai\.(engine\.schedule)\.(BaseSchedule)`", SECTION)
    base = getattr(importlib.import_module(f"{root}.{path[1]}"), path[2])
    compat.uninstall()

    def run(self, engine, data_iter, forward_only=False, return_loss=True, return_output_label=True):
        data, label = self.load_batch(data_iter)
        output = engine(data)
        loss = engine.criterion(output, label)
        engine.backward(loss)
        return output, label, loss

    SCHEDULE.register_module(type("MySchedule", (base,), {method: run}))
    try:
        with launch({"schedule": "MySchedule"}, context=ParallelContext(), verbose=False) as gpc:
            engine = initialize(nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1), nn.MSELoss(), context=gpc)[0]
            engine.zero_grad()
            output, label, loss = engine.execute_schedule(iter([(torch.ones(3, 2), torch.ones(3, 1))]))
            assert torch.equal(loss, nn.MSELoss()(output, label))
            assert engine.step()
            assert type(engine.schedule).__name__ == "MySchedule"
    finally:
        SCHEDULE.remove("MySchedule")
