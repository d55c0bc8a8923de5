"""What a graph of a step reads, as far as it needs no GPU: the runs before one is recorded."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.errors import GradientError
from colonnade.optim import flat_step as capture_module
from colonnade.optim.flat_step import Capture, StepGraph, check_capturable


def test_each_launch_reads_the_newest_numbers_from_memory_that_stays():
    seen: list[tuple[list[float], float, list[float]]] = []
    places: list[tuple[int, ...]] = []

    def launch(plan: object, divisor: torch.Tensor, found_inf: torch.Tensor, groups: Any) -> None:
        seen.append((divisor.tolist(), found_inf.item(), [float(group["lr"]) for group in groups]))
        places.append((divisor.data_ptr(), found_inf.data_ptr(), *(group["lr"].data_ptr() for group in groups)))

    graph, plan = StepGraph(), object()
    groups = [{"params": [], "lr": 0.5, "momentum": 0.9}, {"params": [], "lr": 0.25, "momentum": 0.9}]
    graph.step(launch, plan, torch.tensor([2.0]), torch.tensor(0.0), groups)
    groups[1]["lr"] = 0.125
    graph.step(launch, plan, torch.tensor([3.0]), torch.tensor(1.0), groups)
    assert places[0] == places[1]
    graph.step(launch, plan, torch.tensor([3.0, 4.0]), torch.tensor(1.0), groups)  # a slot more
    groups.append({"params": [], "lr": 1.0, "momentum": 0.9})
    graph.step(launch, plan, torch.tensor([3.0, 5.0]), torch.tensor(0.0), groups)
    assert seen == [
        ([2.0], 0.0, [0.5, 0.25]),
        ([3.0], 1.0, [0.5, 0.125]),
        ([3.0, 4.0], 1.0, [0.5, 0.125]),
        ([3.0, 5.0], 0.0, [0.5, 0.125, 1.0]),
    ]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What graphs do, without a GPU."""
    did: list[str] = []
    graph = SimpleNamespace(replay=lambda: did.append("replay"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, capture_error_mode: nullcontext(did.append("record")))
    return did


def test_the_third_run_is_recorded_and_repeated(recorded: list[str]) -> None:
    capture, holds = Capture(), [object(), object()]
    results = [capture.run(holds, 1, lambda: recorded.append("work") or len(recorded)) for _ in range(5)]
    assert recorded == ["work", "work", "record", "work", "replay", "replay", "replay"]
    assert results == [1, 2, 4, 4, 4]
    recorded.clear()
    for _ in range(3):
        capture.run([*reversed(holds)], 1, lambda: recorded.append("work"))
    assert recorded == ["work", "work", "record", "work", "replay"]


def test_another_learning_rate_is_no_reason_to_record_and_another_momentum_is(recorded: list[str]) -> None:
    graph, plan, groups = StepGraph(), object(), [{"params": [], "lr": 0.5, "momentum": 0.9}]
    for lr, momentum in ((0.5, 0.9), (0.4, 0.9), (torch.tensor(0.3), 0.9), (0.2, 0.9), (0.2, 0.8)):
        recorded.clear()
        groups[0].update(lr=lr, momentum=momentum)
        graph.step(lambda *_: recorded.append("work"), plan, torch.ones(1), torch.zeros(()), groups)
        if momentum == 0.9 and not isinstance(lr, torch.Tensor) and lr == 0.2:
            assert recorded == ["replay"]
    assert recorded == ["work"]


FITS = {"is_cuda": True, "dtype": torch.bfloat16, "device": "cuda:0"}


@pytest.mark.parametrize(
    ("change", "flat", "kernels", "message"),
    [
        ({}, True, True, None),
        ({"dtype": torch.float32}, True, True, None),
        ({}, False, True, "flat_step is False"),
        ({"is_cuda": False, "device": "cpu"}, True, True, "on cpu, and CUDA graphs need a GPU"),
        ({"dtype": torch.float64}, True, True, "dtype torch.float64; supported are fp32"),
        ({}, True, False, "dtype torch.bfloat16; supported are fp32"),
    ],
    ids=str,
)
def test_which_steps_can_be_recorded(change, flat, kernels, message, monkeypatch):
    monkeypatch.setattr(capture_module, "kernels_available", lambda: kernels)
    parameters = [SimpleNamespace(**{**FITS, **change}), SimpleNamespace(**FITS)]
    if message is None:
        check_capturable(parameters, flat)  # type: ignore[arg-type]
        return
    with pytest.raises(GradientError, match=message):
        check_capturable(parameters, flat)  # type: ignore[arg-type]
