"""Every random stream of a rank goes on where it was, with numpy and without; and on which device it may."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.random import random_state, set_random_state, why_not_restorable


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), random.gauss(0, 1), numpy.random.standard_normal()]


def test_every_stream_goes_on_where_it_was():
    context = ParallelContext()
    context.set_seed(3)
    draw()  # of every second gauss one half is kept for the next
    state = random_state(context)
    drawn = draw()
    context.set_seed(4)
    set_random_state(state, context)
    assert draw() == drawn


@pytest.mark.parametrize("here_at", ["save", "load"])
def test_numpy_may_be_there_on_one_side_only(monkeypatch, here_at):
    context = ParallelContext()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "numpy", numpy if here_at == "save" else None)
        state = random_state(context)
    assert ("numpy" in state) == (here_at == "save")
    drawn = draw()
    monkeypatch.setitem(sys.modules, "numpy", numpy if here_at == "load" else None)
    set_random_state(state, context)
    again = draw()
    assert again[:3] == drawn[:3]
    assert again[3] != drawn[3]  # numpy's own went on


@pytest.mark.parametrize(
    ("saved_on", "here", "there_is_cuda", "reason"),
    [
        ("cpu", "cpu", False, None),
        ("cpu", "cpu", True, None),
        ("cpu", "cuda", True, "they were saved without cuda"),
        ("cuda", "cuda", True, None),
        ("cuda", "cpu", True, None),
        ("cuda", "cpu", False, "they were saved on cuda"),
    ],
)
def test_streams_of_a_gpu_need_one(monkeypatch, saved_on, here, there_is_cuda, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there_is_cuda)
    context: Any = SimpleNamespace(device=torch.device(here))
    assert why_not_restorable({"streams": {"default": {"cpu": 1, saved_on: 2}}}, context) == reason
