"""What a graph of a step reads, as far as it needs no GPU: the runs before one is recorded."""

from __future__ import annotations

from typing import Any

import torch

from colonnade.optim.capture import WARM_UP, Capture, StepGraph


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


def test_what_changes_is_recorded_anew():
    capture, one, other = Capture(), object(), object()
    ran = []
    for holds, values in (([one], 1), ([other], 1), ([other], 2), ([other, one], 2), ([one], 2)):
        for _ in range(WARM_UP):  # a run more would record a graph
            capture.run(holds, values, lambda: ran.append(1))
    assert len(ran) == 5 * WARM_UP
