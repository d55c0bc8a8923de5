"""Gradients that stay where they are, on a CPU: a kernel written in Python finds them by their addresses."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine import build, stepper
from colonnade.engine.build import initialize
from colonnade.optim import flat_runs, flat_state, flat_step, kernels
from colonnade.optim.blocks import UNIT


def sgd(
    buffers: Any, scattered: Any, table: Tensor, control: Any, lr: float, momentum: float, dampening: float, *_: Any
) -> None:
    """What the Triton kernel does, without momentum."""
    param, _, _ = buffers
    _, divisor, found_inf = control
    addresses, limits, owners = (tensor.tolist() for tensor in scattered)
    for (first, last, _), owner in zip(table.tolist(), owners, strict=True):
        start, stop = first * UNIT, min(last * UNIT, limits[owner])
        if stop > start and not found_inf:
            found = (ctypes.c_float * (stop - start)).from_address(addresses[owner] + 4 * start)
            param[start:stop] -= lr / float(divisor) * torch.tensor(list(found))


@pytest.fixture
def python_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(sgd=sgd)
    monkeypatch.setitem(sys.modules, "colonnade.optim.kernels.step_kernels", fake)
    monkeypatch.setattr(kernels, "step_kernels", fake, raising=False)
    monkeypatch.setattr(flat_step, "prepare", flat_runs.KernelRun)
    monkeypatch.setattr(flat_state, "pinned", lambda numbers: numbers)
    for module in (build, stepper):
        monkeypatch.setattr(module, "can_scatter", lambda parameter: True)


class Model(nn.Module):
    """Sizes that are no multiple of anything, a memory format of its own, a layer that is thawed later."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.first, self.second, self.late = nn.Linear(45, 13), nn.Linear(13, 7), nn.Linear(13, 7)
        self.late.requires_grad_(False)

    def forward(self, x: Tensor, without: bool) -> Tensor:
        y = torch.tanh(self.first(self.conv(x).flatten(1)))
        return (self.late(y) if without else self.second(y) + self.late(y)).square().mean()


def test_every_element_of_every_gradient_is_found(python_kernel: None) -> None:
    """With layers that come later and that are left out; two groups of parameters, of which one is clipped by itself."""
    clip = {"max_norm": 0.05, "groups": {"own": {"params": "second.*", "max_norm": 0.01}}}
    with launch({"clip_grad_norm": clip}, context=ParallelContext(), verbose=False) as gpc:
        torch.manual_seed(0)
        model, plain = Model(), Model()
        plain.load_state_dict(model.state_dict())
        made = []
        for one in (model, plain):
            fast = {"params": [*one.conv.parameters(), *one.second.parameters()], "lr": 0.5}
            made.append(torch.optim.SGD([fast, {"params": [*one.first.parameters(), *one.late.parameters()]}], lr=0.1))
        engine, optimizer = initialize(model, made[0], context=gpc)[0], made[1]
        assert not engine._sync.synchroniser.buckets
        for step in range(6):
            if step == 2:
                model.late.requires_grad_(True)
                plain.late.requires_grad_(True)
            x = torch.randn(4, 3, 5, 5)
            engine.zero_grad()
            engine.backward(engine(x, step == 4))
            before = [parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None]
            engine.step()
            assert before == [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
            optimizer.zero_grad()
            plain(x, step == 4).backward()
            own = [p for p in plain.second.parameters() if p.grad is not None]
            rest = [p for name, p in plain.named_parameters() if not name.startswith("second.")]
            norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
            torch.nn.utils.clip_grads_with_norm_(rest, 0.05, norm)
            if own:
                torch.nn.utils.clip_grad_norm_(own, 0.01)
            optimizer.step()
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
        engine.close()
