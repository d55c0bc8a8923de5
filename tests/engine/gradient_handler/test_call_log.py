"""What handlers call is noted by handler, parameter and ranks; where two ranks part is found."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colonnade.comm.torch_versions import noting_collectives
from colonnade.engine.gradient_handler.base import BaseGradientHandler
from colonnade.engine.gradient_handler.call_log import CallLog, Entry, Steps, first_difference, read_steps
from colonnade.testing import run_world

A: Entry = ("Mine", "all_reduce of 'a'", (0, 1))
B: Entry = ("Mine", "all_reduce of 'b'", (0, 1))
OTHER: Entry = ("Mine", "all_reduce of 'c'", (0, 2))
BEGINS: Entry = ("Mine", "begins", ())


def steps(*called: tuple[Entry, ...]) -> Steps:
    return list(enumerate(called))


@pytest.mark.parametrize(
    ("one", "other", "ranks", "found"),
    [
        (steps((A, B)), steps((A, B)), (0, 1), None),
        (steps((A, B), (A, B)), steps((A, B), (A,)), (0, 1), (1, B, None)),
        (steps((A, B)), steps((B, A)), (0, 1), (0, A, B)),
        (steps((A, OTHER)), steps((OTHER, A)), (0, 1), None),
        (steps((BEGINS, A)), steps((A,)), None, (0, BEGINS, None)),
    ],
)
def test_the_first_difference_of_two_ranks(one, other, ranks, found):
    told = first_difference(one, other, ranks)
    assert (told is None) == (found is None)
    if told is not None:
        for said, entry in zip(told[1:], found[1:], strict=True):
            assert ("makes no further call" in said) if entry is None else said.startswith("Mine ")
        assert told[0] == found[0]


def test_a_rank_that_is_under_way_may_make_further_calls():
    assert first_difference(steps((A, B)), steps((A,)), (0, 1)) is not None
    assert first_difference(steps((A, B)), steps((A,)), (0, 1), under_way=True) is None
    assert first_difference(steps((A,)), steps((A, B)), (0, 1), under_way=True) is not None
    assert first_difference(steps((A,), (A,)), steps((), (A,)), (0, 1), under_way=True) is not None


def test_steps_come_back_from_json():
    told = steps((BEGINS, A), ())
    assert read_steps(json.loads(json.dumps(told))) == told


class Mixed(BaseGradientHandler):
    """Sums one gradient in place, one by way of a copy, and a number."""

    def handle_gradient(self) -> None:
        first, second = self._model.parameters()
        dist.all_reduce(first.grad)
        copy = second.grad.clone()
        dist.broadcast(copy, 0)
        dist.barrier()


def note_them() -> list[Entry]:
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    places: list[str] = []
    log = CallLog(model.named_parameters, places.append)
    for step in range(2):
        log.run(Mixed(model))
        if step:
            assert log.so_far[-1][0] == 1
        log.end_step(step)
    assert log.steps[0][1] is log.steps[1][1]  # kept once
    assert places[0] == "in Mixed, at all_reduce of 'weight' over ranks [0, 1]"
    digests = dict(log.digests)
    log.forget()
    assert log.steps == []
    assert log.digests == digests
    dist.all_reduce(torch.ones(1))  # nobody notes this one
    called = list(log.so_far[0][1])
    assert called == []
    return list(dict.fromkeys(digests))  # type: ignore[arg-type]


def fail_inside() -> bool:
    before = vars(dist.ProcessGroup)["allreduce"]
    seen: list[str] = []
    with suppress(ZeroDivisionError), noting_collectives(lambda name, group, given: seen.append(name)):
        dist.all_reduce(torch.ones(1))
        raise ZeroDivisionError
    assert seen == ["all_reduce"]
    return vars(dist.ProcessGroup)["allreduce"] is before


def both() -> tuple[object, bool]:
    return note_them(), fail_inside()


def test_collectives_are_noted_before_they_are_made_and_only_inside():
    for noted, restored in run_world(2, both).values:
        assert noted == [None, (0, 1)]
        assert restored


def test_what_was_called_so_far_ends_with_the_step_under_way():
    log = CallLog(nn.Linear(1, 1).named_parameters, lambda text: None)
    assert log.so_far == [(-1, ())]
    log._entries += [A]
    assert log.so_far == [(-1, (A,))]
    log.end_step(3)
    log._entries += [B]
    assert log.so_far == [(3, (A,)), (4, (B,))]
    log.end_step(4)
    first = dict(log.digests)
    log.forget()
    assert (log.steps == [], log.digests == first) == (True, True)
    assert log.so_far == [(-1, ())]
