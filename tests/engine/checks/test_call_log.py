"""What handlers call is noted by handler, parameter and ranks; where two ranks part is found."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colonnade.comm.torch_versions import noting_collectives
from colonnade.engine.guard import CallLog, Entry, Steps, first_difference
from colonnade.gradients.handler import BaseGradientHandler, PlannedGradientHandler
from tests.ranks import on_ranks

A: Entry = ("Mine", "all_reduce of 'a'", (0, 1))
B: Entry = ("Mine", "all_reduce of 'b'", (0, 1))
OTHER: Entry = ("Mine", "all_reduce of 'c'", (0, 2))
BEGINS: Entry = ("Mine", "begins", ())


def steps(*called: tuple[Entry, ...]) -> Steps:
    return list(called)


@pytest.mark.parametrize(
    ("one", "other", "ranks", "found"),
    [
        (steps((A, B)), steps((A, B)), (0, 1), None),
        (
            steps((A, B), (A, B)),
            steps((A, B), (A,)),
            (0, 1),
            (1, f"Mine calls {B[1]}", "makes no further call after 1"),
        ),
        (steps((A,)), steps((A, B)), [0, 1], (0, "makes no further call after 1", f"Mine calls {B[1]}")),
        (steps((A, B)), steps((B, A)), (0, 1), (0, f"Mine calls {A[1]}", f"Mine calls {B[1]}")),
        (steps((A, OTHER)), steps((OTHER, A)), (0, 1), None),
        (steps((BEGINS, A)), steps((A,)), None, (0, "Mine begins", "makes no further call after 0")),
        (steps((A,), (A,)), steps((A,)), (0, 1), None),  # what one of them has not come to yet is no difference
    ],
)
def test_the_first_difference_of_two_ranks(one, other, ranks, found):
    assert first_difference(one, other, ranks, under_way=False) == found


def test_a_rank_that_is_under_way_may_make_further_calls():
    def differ(one: Steps, other: Steps) -> bool:
        return first_difference(one, other, (0, 1), under_way=True) is not None

    assert not differ(steps((A, B)), steps((A,)))
    assert differ(steps((A,)), steps((A, B)))
    assert differ(steps((A,), (A,)), steps((), (A,)))
    assert not differ(steps((A,), (A, B)), steps((A,), (A,)))
    assert differ(steps((A,), (A, B)), steps((A,), (B,)))


class Mixed(BaseGradientHandler):
    """Sums one gradient in place, one by way of a copy, and numbers of one rank alone; waits for the others."""

    alone: Any = None

    def handle_gradient(self) -> None:
        first, second = self._model.parameters()
        dist.all_reduce(first.grad)
        copy = second.grad.clone()
        dist.broadcast(copy, 0)
        dist.all_reduce(second.grad, group=self.alone)
        dist.barrier()


class Planned(PlannedGradientHandler):
    def reductions(self) -> list[Any]:
        return []


def note_them() -> list[Entry]:
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    places: list[str] = []
    log = CallLog(model.named_parameters, places.append)
    Mixed.alone, _ = dist.new_subgroups(group_size=1)
    handlers = Mixed(model), Planned(model)
    handlers[1].use(SimpleNamespace())  # type: ignore[arg-type]
    for step in range(2):
        for handler in handlers:
            log.run(handler)
        assert len(log.so_far) == step + 1
        log.end_step()
    assert log.steps[0] is log.steps[1]  # kept once
    over = " over ranks [0, 1]"
    begins, *called, ends = log.steps[0]
    assert (begins, ends) == (("Mixed", "begins", ()), ("Planned", "runs its planned reductions", ()))
    assert called[:2] == [
        ("Mixed", f"{what}", (0, 1)) for what in ("all_reduce of 'weight'", "broadcast of 2 elements")
    ]
    assert not any("'bias'" in place for place in places)  # over one rank nobody waits
    assert places[:2] == [f"in Mixed, at {what}{over}" for _, what, _ in called[:2]]
    assert places[-1] == "summing the gradients"
    digests = dict(log.digests)
    log.forget()
    assert (log.steps, log._known, log._texts) == ([], {}, {})
    assert log.digests == digests
    dist.all_reduce(torch.ones(1))  # nobody notes this one
    assert log.so_far == [()]
    return list(digests)  # type: ignore[arg-type]


def fail_inside() -> bool:
    before = vars(dist.ProcessGroup)["allreduce"]
    seen: list[str] = []
    with suppress(ZeroDivisionError), noting_collectives(lambda name, group, given: seen.append(name)):
        dist.all_reduce(torch.ones(1))
        raise ZeroDivisionError
    assert seen == ["all_reduce"]
    return vars(dist.ProcessGroup)["allreduce"] is before


@on_ranks(2)
def test_collectives_are_noted_before_they_are_made_and_only_inside():
    noted, restored = note_them(), fail_inside()
    assert noted == [None, (0, 1)]
    assert restored


def digests_of(*called: tuple[Entry, ...]) -> dict[Any, int]:
    log = CallLog(nn.Linear(1, 1).named_parameters, lambda text: None)
    for step in called:
        log._entries += step
        log.end_step()
    return {ranks: log.digests[ranks] for ranks in (None, (0, 1), (0, 2), (5, 6))}


def test_digests_tell_calls_apart_by_the_ranks_they_were_over():
    usual = digests_of((BEGINS, A, OTHER), (BEGINS, B))
    assert digests_of((BEGINS, OTHER, A), (BEGINS, B)) == usual
    assert usual[5, 6] == 0
    unlike = {  # what differs: over which ranks it is seen
        ((BEGINS, B, OTHER), (BEGINS, A)): [(0, 1)],
        ((BEGINS, A, OTHER), (BEGINS, B, B)): [(0, 1)],
        ((BEGINS, A), (BEGINS, B)): [(0, 2)],
        ((BEGINS, A, OTHER), (B,)): [None],
        ((A, OTHER), (BEGINS, BEGINS, B)): [None],
    }
    for called, expected in unlike.items():
        other = digests_of(*called)
        assert [ranks for ranks in usual if other[ranks] != usual[ranks]] == expected
