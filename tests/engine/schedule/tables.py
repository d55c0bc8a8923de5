"""Tables for tests: random valid ones, and those of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from colonnade.engine.schedule.actions import Action, Kind, Table, parse_table


@st.composite
def valid_tables(draw: st.DrawFn, max_ranks: int = 4, max_stages: int = 6, max_micro_batches: int = 4) -> Table:
    """Any valid table: stages anywhere on the ranks, B or I and W at will, any order that the needs allow.

    It is built by running it: again and again one of the actions that could run now is put down.
    """
    num_ranks = draw(st.integers(1, max_ranks))
    num_stages = draw(st.integers(num_ranks, max_stages))
    extra = draw(st.lists(st.integers(0, num_ranks - 1), min_size=num_stages, max_size=num_stages))
    homes = draw(st.permutations([*range(num_ranks), *extra[: num_stages - num_ranks]]))
    micro_batches = range(draw(st.integers(1, max_micro_batches)))
    split = {(s, k): draw(st.booleans()) for s in range(num_stages) for k in micro_batches}
    return _build(homes, split, lambda count: draw(st.integers(0, count - 1)))


def _build(homes: Sequence[int], split: dict[tuple[int, int], bool], choose: Callable[[int], int]) -> Table:
    """Put down one of the actions that could run now, again and again."""
    ready = [Action(stage, Kind.FORWARD, k) for stage, k in split if stage == 0]
    table: Table = {rank: [] for rank in range(max(homes) + 1)}
    while ready:
        action = ready.pop(choose(len(ready)))
        table[homes[action.stage]].append(action)
        ready += _follow(action, len(homes) - 1, split)
    return table


def _follow(action: Action, last_stage: int, split: dict[tuple[int, int], bool]) -> list[Action]:
    stage, kind, k = action

    def backward(stage: int) -> Action:
        return Action(stage, Kind.INPUT if split[stage, k] else Kind.BACKWARD, k)

    if kind is Kind.FORWARD:
        return [Action(stage + 1, kind, k) if stage < last_stage else backward(stage)]
    if kind is Kind.WEIGHT:
        return []
    own = [Action(stage, Kind.WEIGHT, k)] if kind is Kind.INPUT else []
    return own + ([backward(stage - 1)] if stage > 0 else [])


def torch_table(name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Table:
    """The table a schedule class of torch.distributed.pipelining describes itself with."""
    kind: Any = getattr(schedules, name)
    num_stages = num_ranks * num_chunks
    v_shape = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    indices = [0, num_stages - 1] if v_shape else [chunk * num_ranks for chunk in range(num_chunks)]
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=index,
            is_first=index == 0,
            is_last=index == num_stages - 1,
            group_rank=0,
            group_size=num_ranks,
            group=None,
            num_stages=num_stages,
            has_backward=True,
            submod=None,
            stage_index_to_group_rank=None,
        )
        for index in indices
    ]
    if issubclass(kind, schedules.PipelineScheduleSingle):
        return parse_table(kind(stages[0], num_microbatches, loss_fn=max)._get_pipeline_order())
    return parse_table(kind(stages, num_microbatches, loss_fn=max).pipeline_order)


def random_table(random: Random, num_ranks: int, num_stages: int, num_microbatches: int) -> Table:
    """A valid table by chance, as `valid_tables` makes them."""
    homes = [*range(num_ranks), *(random.randrange(num_ranks) for _ in range(num_stages - num_ranks))]
    random.shuffle(homes)
    split = {(s, k): random.random() < 0.5 for s in range(num_stages) for k in range(num_microbatches)}
    return _build(homes, split, random.randrange)
