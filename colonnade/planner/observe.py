"""What a real step does, counted as a plan counts it: what a plan is compared with."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from colonnade.engine import Engine
from colonnade.planner.recorder import Recorder
from colonnade.planner.records import RankClass

Calls = Counter[tuple[str, int, int]]
"""(op, bytes, ranks) -> how often a rank calls it in a step."""


@dataclass(frozen=True)
class Observed:
    """One rank's step: its collectives, the bytes of its fullest moment, and the seconds of a step."""

    rank: int
    calls: Calls
    memory: int
    seconds: float


def observe(engine: Engine, step: Callable[[], Any], warm: int = 3, timed: int = 5, counted: bool = True) -> Observed:
    """Run steps of an engine, and count one of them. On every rank alike; `step` runs zero_grad to step.

    The first steps are others: buckets are arranged anew, batches compared, memory and messages made ready. `counted`: whether
    its collectives are noted, which compiled code would be compiled anew for.
    """
    for _ in range(warm):
        step()
    seconds = []
    for _ in range(timed):
        start = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    engine.zero_grad()
    memory = _peak(engine, step)
    recorder = Recorder()
    with recorder if counted else nullcontext():
        step()
    calls = Counter((call.op, call.bytes, len(call.ranks)) for call in recorder.take().calls if call.op != "receive")
    return Observed(engine.context.get_global_rank(), calls, memory, median(seconds) if seconds else 0.0)


def planned_calls(one: RankClass) -> Calls:
    """The collectives of a plan, counted alike."""
    found: Calls = Counter()
    for call in (call for call in one.collectives if call.op != "receive"):
        found[call.op, call.bytes, call.ranks] += call.count
    return found


def _peak(engine: Engine, step: Callable[[], Any]) -> int:
    """Bytes at the fullest moment of a step: what is held before it, and the most that the allocator gives beyond."""
    held = engine.memory().held.device + sum(buffer.nbytes for buffer in engine.model.buffers()) + _turns(engine)
    if engine.context.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(engine.context.device)
        step()
        return int(torch.cuda.max_memory_allocated(engine.context.device))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    now = most = 0
    for size in _allocations(profiled):
        now += size
        most = max(most, now)
    return held + most


def _turns(engine: Engine) -> int:
    """Bytes that buckets without memory of their own take turns in."""
    taken = [
        buffer.flat.untyped_storage()
        for bucket in engine._sync.synchroniser.layout
        if not bucket.keeps_gradients
        for buffer in bucket.buffers
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in taken}.values())


def _allocations(profiled: Any) -> Iterator[int]:
    """What the host's allocator gave (and took back: negative), in the order of time."""
    found, waiting = [], list(profiled.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag.name == "Allocation":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    return (size for _, size in sorted(found, key=lambda each: each[0]))
