"""The Triton kernels of norm and step, written in Python for a CPU, and a fixture that installs them."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade import optim
from colonnade.optim import bucket_step, engine_optimizer, flat_step, norm
from colonnade.optim.norm import UNIT


def square_sums(data: Tensor, scattered: tuple[Tensor, Tensor] | None, table: Tensor, out: Tensor) -> None:
    for at, (first, last, owner) in enumerate(table.tolist()):
        if scattered is None:
            values = data[first * UNIT : last * UNIT]
        else:
            addresses, limits = scattered
            values = _numbers_at(int(addresses[owner]), first * UNIT, min(last * UNIT, int(limits[owner])))
        out[at] = values.double().square().sum()


def add_ranges(values: Tensor, ranges: Tensor) -> Tensor:
    sums = torch.stack([values[first:last].sum() for first, last in ranges.tolist()])
    return torch.stack([sums, (~sums.isfinite()).double()])


def sgd(
    buffers: Any, scattered: Any, table: Tensor, control: Any, lr: float, momentum: float, dampening: float, *_: Any
) -> None:
    """Without momentum, and for scattered gradients."""
    param, _, _ = buffers
    _, divisor, found_inf = control
    addresses, limits, owners = (tensor.tolist() for tensor in scattered)
    for (first, last, _), owner in zip(table.tolist(), owners, strict=True):
        start, stop = first * UNIT, min(last * UNIT, limits[owner])
        if stop > start and not found_inf:
            param[start:stop] -= float(lr) / float(divisor) * _numbers_at(addresses[owner], start, stop)


def _numbers_at(address: int, start: int, stop: int) -> Tensor:
    count = max(stop - start, 0)
    return torch.tensor(list((ctypes.c_float * count).from_address(address + 4 * start)))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm and step use these kernels, and gradients without a reduction stay where they are, as on a GPU."""
    fake = SimpleNamespace(sgd=sgd, square_sums=square_sums, add_ranges=add_ranges)
    monkeypatch.setitem(sys.modules, "colonnade.optim.optim_kernels", fake)
    monkeypatch.setattr(optim, "optim_kernels", fake, raising=False)
    monkeypatch.setattr(flat_step, "prepare_launch", flat_step.TritonLaunch)
    monkeypatch.setattr(norm, "pinned", lambda numbers: numbers)
    monkeypatch.setattr(norm, "suits_kernel", lambda rows, p: p == 2.0)
    for module in (bucket_step, engine_optimizer):
        monkeypatch.setattr(module, "can_scatter", lambda *_: True)
