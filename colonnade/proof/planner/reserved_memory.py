"""Memory that torch's allocator reserves in the first steps of a rank: the allocations and frees of its passes, replayed.

The allocator (`allocator.py`) reserves more than a step allocates, because blocks of one size do not fit requests of another. The
replay has the parameters as the model makes them, two steps in the order of the schedule, the optimizer's state after the first
backward pass, and the workspaces of cuBLAS; gradients are freed by `zero_grad` at the start of the next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from colonnade.engine.schedule.actions import Action, Kind
from colonnade.proof.planner.allocator import CachingAllocator, OutOfMemory, replayed
from colonnade.proof.planner.planned_passes import StagePass
from colonnade.proof.planner.planned_sums import GradientPlan

STEPS = 3
"""Later steps allocate as the third one does."""
WORKSPACES = (32 << 20, 1 << 20)
"""What cuBLAS and cuBLASLt take for themselves at the first product of a thread: forward and backward run in two."""

Event = tuple[int, int, int]
"""(number, bytes or 0 for a free, stream), as `allocator.replayed` has them."""


@dataclass(frozen=True)
class Reserved:
    """Peaks of a replay, in bytes. `expandable`: what is reserved with expandable segments."""

    allocated: int
    reserved: int
    expandable: int
    fits: bool
    fits_expandable: bool


def reserve(
    model: nn.Module,
    gradients: GradientPlan,
    passes: Mapping[int, StagePass],
    program: Sequence[Action],
    capacity: float,
) -> Reserved | None:
    """Replay the steps of a rank; None if its passes have no events, as on a CPU."""
    mine = {action.stage for action in program}
    if not mine or any(passes[stage].events is None for stage in mine):
        return None
    events = list(_events(model, gradients, passes, program))
    plain = replayed(events, CachingAllocator())
    expandable = replayed(events, CachingAllocator(expandable=True))
    return Reserved(
        plain.peak_allocated,
        plain.peak_reserved,
        expandable.peak_reserved,
        _fits(events, capacity, False),
        _fits(events, capacity, True),
    )


def _fits(events: Sequence[Event], capacity: float, expandable: bool) -> bool:
    """Whether the replay ends on a device with so much memory, with unused segments released where it is full."""
    try:
        replayed(events, CachingAllocator(capacity, expandable))
    except OutOfMemory:
        return False
    return True


def _events(
    model: nn.Module, gradients: GradientPlan, passes: Mapping[int, StagePass], program: Sequence[Action]
) -> Iterator[Event]:
    number = _Numbers()
    held = list(number.allocate(parameter.nbytes for parameter in model.parameters()))
    yield from ((each, size, 0) for each, size in held)
    yield from ((each, size, 0) for each, size in number.allocate(buffer.nbytes for buffer in model.buffers()))
    pieces = gradients.pieces
    if pieces.in_buckets:  # flat memory of parameters and gradients, which buckets make when the engine is built
        yield from _moved(number, held, pieces.parameters)
        yield from ((each, size, 0) for each, size in number.allocate(pieces.gradients))
    left: list[int] = []
    for step in range(STEPS):
        yield from ((each, 0, 0) for each in left)
        left = []
        alive: dict[int, int] = {}
        begun = set[Kind]()
        for at, action in enumerate(program):
            part = {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.INPUT: 1}.get(action.kind)
            if part is None:
                continue
            if step == 0 and action.kind not in begun:
                begun.add(action.kind)
                yield from ((each, size, 0) for each, size in number.allocate(WORKSPACES))
            recorded = passes[action.stage].events
            assert recorded is not None
            base = number.base(step, action.stage, action.micro_batch or 0, at)
            for each, size in recorded[part]:
                if size:
                    alive[base + each] = size
                else:
                    alive.pop(base + each, None)
                yield base + each, size, 0
        left = list(alive)
        if step == 0:
            if not pieces.in_buckets and pieces.parameters:
                yield from _moved(number, held, pieces.parameters)
            yield from ((each, size, 0) for each, size in number.allocate(pieces.state))
        yield from _for_a_moment(number, gradients.stepping)


def _moved(number: _Numbers, held: Sequence[tuple[int, int]], sizes: Sequence[int]) -> Iterator[Event]:
    """Parameters that move into flat memory, one piece of it after another."""
    waiting = list(held)
    for size in sizes:
        yield next(number.allocate([size]))[0], size, 0
        room = size
        while waiting and waiting[0][1] <= room:
            each, nbytes = waiting.pop(0)
            room -= nbytes
            yield each, 0, 0
    yield from ((each, 0, 0) for each, _ in waiting)


def _for_a_moment(number: _Numbers, size: int) -> Iterator[Event]:
    for each, nbytes in number.allocate([size] if size else []):
        yield each, nbytes, 0
        yield each, 0, 0


class _Numbers:
    """Numbers of allocations that no other part of the replay uses."""

    def __init__(self) -> None:
        self._next = 0
        self._bases: dict[tuple[int, int, int], int] = {}

    def allocate(self, sizes: Sequence[int] | Iterator[int]) -> Iterator[tuple[int, int]]:
        """Yield (number, bytes) of new allocations."""
        for size in sizes:
            if size > 0:
                self._next += 1
                yield self._next, int(size)

    def base(self, step: int, stage: int, micro_batch: int, at: int) -> int:
        """Return what is added to the numbers of a pass: the same in forward and backward of a micro-batch."""
        return self._bases.setdefault((step, stage, micro_batch), (1 + len(self._bases)) << 32)
