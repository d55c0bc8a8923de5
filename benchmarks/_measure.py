"""Fair timing on a noisy machine: contestants take turns within one run, and only ratios of one run are compared."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def interleave(turns: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median of what each contestant returns, once per round; each round begins with another one."""
    names = list(turns)
    measured: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            measured[name].append(turns[name]())
    return {name: statistics.median(values) for name, values in measured.items()}


def interleaved(cases: Mapping[str, Callable[[], Any]], rounds: int, device: str = "cpu") -> dict[str, float]:
    """The median seconds of each case, after two unmeasured calls; on a GPU until its work is done."""
    turns = {name: _timed(case, _until_done(device)) for name, case in cases.items()}
    interleave(turns, 2)
    return interleave(turns, rounds)


def has_device(device: str) -> bool:
    """Whether a GPU is available; if not, prints a line. A GPU benchmark then ends with exit code 0."""
    import torch

    found = device == "cpu" or torch.cuda.is_available()
    if not found:
        print("this benchmark needs a GPU and torch finds none: nothing was measured")
    return found


def report(ratios: Mapping[str, float], goals: Mapping[str, float], as_json: bool, **more: Any) -> bool:
    """Print the ratios with their goals (lower is better), or one JSON object; returns whether all goals are met."""
    missed = sorted(case for case, goal in goals.items() if ratios[case] > goal)
    if as_json:
        machine = {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}
        rounded = {case: round(ratio, 4) for case, ratio in ratios.items()}
        print(json.dumps({"ratios": rounded, "goals": dict(goals), "missed": missed, "machine": machine, **more}))
        return not missed
    for case, ratio in ratios.items():
        verdict = f"goal <= {goals[case]:.2f}, {'missed' if case in missed else 'met'}" if case in goals else ""
        print(f"{case:32s} {ratio:6.3f}  {verdict}")
    return not missed


def timed_on_gpu(step: Callable[[], Any]) -> float:
    """Time of a step on the GPU in milliseconds, measured with CUDA events."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _timed(case: Callable[[], Any], until_done: Callable[[], None]) -> Callable[[], float]:
    def turn() -> float:
        until_done()
        begin = time.perf_counter()
        case()
        until_done()
        return time.perf_counter() - begin

    return turn


def _until_done(device: str) -> Callable[[], None]:
    if device == "cpu":
        return lambda: None
    import torch

    return torch.cuda.synchronize
