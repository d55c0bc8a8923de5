"""The host's work in a steady `engine.step()` on a GPU: few operators, as many for any number of layers, and no value read.

The kernels of norm and step are left out, so that the code for a GPU runs on a CPU. A change of the table is a decision.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from colonnade import optim
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.models import GPT
from tests.optim import python_kernels

WARM_UP = 8
OPERATORS: dict[str, tuple[dict[str, Any], int]] = {
    "not clipped": ({"clip_grad_norm": None}, 4),
    "clipped": ({}, 16),
    "fp16": ({"fp16": True}, 23),
    "by layer": ({"clip_grad_norm": {"max_norm": 1.0, "per": "layer"}}, 21),
    "zclip": ({"clip_grad_norm": {"method": "zclip"}}, 55),
    "accumulated": ({"gradient_accumulation": 2}, 46),
}
"""By case: the settings, and the operators of a step."""
READS = {"item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy", "nonzero"}


class Seen(TorchDispatchMode):
    """The operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """The calls that read values on the host, other than of the flag that was copied there before."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def steady(layers: int, config: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(operators, reads) of a steady `engine.step()`."""
    with launch({"clip_grad_norm": 1.0, **config}, context=ParallelContext(), verbose=False) as gpc:
        model = GPT(16, 8, 16, 2, layers, context=gpc)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, *_ = initialize(model, optimizer, model.criterion(), context=gpc)
        tokens = torch.ones(2, 8, dtype=torch.int64)

        def passes() -> None:
            for micro in range(engine.accumulation):
                engine.zero_grad()
                engine.backward(engine.criterion(engine(tokens), tokens))
                if micro + 1 < engine.accumulation:
                    engine.step()

        for _ in range(WARM_UP):
            passes()
            engine.step()
        passes()
        with Seen() as seen, Reads() as reads:
            engine.step()
        engine.close()
        return seen.names, reads.names


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    python_kernels.install(monkeypatch)
    made: dict[int, Tensor] = {}

    def add_ranges(_: Tensor, ranges: Tensor) -> Tensor:
        if len(ranges) not in made:
            made[len(ranges)] = torch.zeros(2, len(ranges), dtype=torch.float64)
        return made[len(ranges)]

    fake = SimpleNamespace(adam=lambda *_: None, square_sums=lambda *_: None, add_ranges=add_ranges)
    monkeypatch.setitem(sys.modules, "colonnade.optim.optim_kernels", fake)
    monkeypatch.setattr(optim, "optim_kernels", fake, raising=False)
    monkeypatch.setattr("colonnade.optim.norm.ScatteredGradient.point_to", lambda *_: None)  # addresses stay on a GPU


@pytest.mark.parametrize("name", OPERATORS)
def test_a_step_costs_the_host_a_few_operators(name: str, no_kernels: None) -> None:
    config, expected = OPERATORS[name]
    operators, reads = steady(2, config)
    assert len(operators) == expected, operators
    # `tolist`: the flag of the step before, which was copied to the host while that step ran. `__bool__`: whether some ranks had
    # means and others (sum, count), which is read only of counts on a CPU.
    assert reads in ([], ["tolist"]) or (name == "accumulated" and reads == ["__bool__"]), reads
    assert sum("_local_scalar_dense" in operator for operator in operators) == reads.count("__bool__"), operators
    if name != "by layer":
        assert len(steady(6, config)[0]) == expected
