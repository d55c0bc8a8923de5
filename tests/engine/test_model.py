"""Models bring what is theirs: the engine of a plain model imports no family, and asks a registered one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine import model as families
from colonnade.engine.build import initialize
from colonnade.engine.model import ModelFamily, register_family
from colonnade.errors import PlacementError

PLAIN = """
import sys, torch, colonnade
from torch import nn
model = nn.Linear(2, 2)
colonnade.launch({}, verbose=False)
engine, *_ = colonnade.initialize(model, torch.optim.AdamW(model.parameters()), nn.MSELoss())
engine.backward(engine.criterion(engine(torch.ones(1, 2)), torch.ones(1, 2)))
engine.step()
print(*sorted(name for name in sys.modules if name.split(".")[0] == "colonnade"))
"""
MOST = 90
NOT_OF_A_PLAIN_MODEL = ("hf", "nn", "models", "checkpoint", "proof", "compat", "cli", "trainer", "testing")


def test_a_plain_model_reaches_few_modules_and_no_family():
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, timeout=120, check=True)
    reached = done.stdout.split()
    assert len(reached) <= MOST, reached
    assert not {name.split(".")[1] for name in reached if "." in name}.intersection(NOT_OF_A_PLAIN_MODEL)


class Squared:
    """The loss of a model of the family below."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def run(self, x: Tensor) -> tuple[Tensor, str]:
        return self.model(x).square().mean(), "from the family"


class Watch:
    open = 0

    def __init__(self) -> None:
        Watch.open += 1

    def close(self) -> None:
        Watch.open -= 1


class OneFamily(ModelFamily):
    def refuse(self, model: nn.Module) -> None:
        if hasattr(model, "unfit"):
            raise PlacementError("the family says no")

    def training_loss(self, model: nn.Module) -> Any:
        return Squared(model)

    def watch_first_step(self, model: nn.Module, context: ParallelContext) -> Watch:
        return Watch()

    def has_own_format(self, model: nn.Module) -> bool:
        return True

    def export(self, model: nn.Module, folder: str | Path, context: ParallelContext, dtype: torch.dtype | None) -> Path:
        path = Path(folder, "own format")
        path.write_text(str(dtype))
        return path


FAMILY = OneFamily()


def test_an_engine_asks_the_family_of_its_model(monkeypatch, tmp_path):
    monkeypatch.setattr(families, "_homes", dict(families._homes))
    register_family(__name__, signs=["one_sign"])
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].one_sign = True  # of a module inside the model
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        engine = initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), context=gpc)[0]
        assert Watch.open == 1
        loss, said = engine(torch.ones(1, 2))
        assert said == "from the family"
        engine.backward(loss)
        engine.step()
        assert Watch.open == 0
        assert engine.save_pretrained(tmp_path, dtype=torch.bfloat16).read_text() == "torch.bfloat16"
        engine.close()
        net.unfit = True
        with pytest.raises(PlacementError, match="the family says no"):
            initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), context=gpc)
        plain = nn.Linear(2, 2)
        assert families.families_of(plain) == []
        assert families.training_loss_of(plain) is None
        assert families.own_format_of(plain) is None
