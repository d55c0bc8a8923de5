"""A synchroniser in one process: when passes are open, what is noticed of gradients, and what a step leaves behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade.errors import GradientError
from colonnade.gradients.sums import Sharding, Sum, SyncOptions
from colonnade.gradients.synchroniser import StepOutcome, Synchroniser
from colonnade.gradients.uneven import PiggybackedFlags

SMALL = SyncOptions(bucket_mb=64 / 2**20, first_bucket_mb=32 / 2**20)


def alone(*numels: int, **more: Any) -> tuple[Synchroniser, tuple[nn.Parameter, ...]]:
    parameters = tuple(nn.Parameter(torch.zeros(numel)) for numel in numels)
    names = tuple(f"p{at}" for at in range(len(numels)))
    return Synchroniser(
        [Sum(names, parameters, (0,), None, 2.0, SMALL, **more)], log=more.pop("log", print)
    ), parameters


def backward(parameters: tuple[nn.Parameter, ...], value: float = 4.0) -> None:
    sum((value * parameter).sum() for parameter in parameters).backward()


def test_a_new_one_has_seen_nothing():
    reducer, parameters = alone(8, 8, 8)
    assert (reducer.generation, reducer.unprepared_gradients) == (0, False)
    assert reducer.parameters == {id(parameter) for parameter in parameters}
    assert [bucket.names for bucket in reducer.layout] == [("p2",), ("p1", "p0")]
    assert reducer._step == 0
    assert not reducer.host_waits
    reducer.buckets[0].transport.host_waits = True  # type: ignore[misc]
    assert reducer.host_waits


def test_the_scale_of_a_step_is_told_in_its_outcome():
    reducer, parameters = alone(8)
    for scale in (0.5, None):
        parameters[0].grad = None
        reducer.prepare(last=True)
        backward(parameters)
        assert reducer.wait(scale) == StepOutcome(scale, [])
        assert parameters[0].grad.tolist() == [2.0 if scale is None else 1.0] * 8


def test_every_pass_begins_for_all_sums():
    reducer, parameters = alone(8)
    for _ in range(2):  # what a bucket waits for is what came in one pass
        reducer.prepare(last=True)
        backward(parameters)
    reducer.wait()
    assert [bucket.firings for bucket in reducer.buckets] == [1]
    parameters[0].data = parameters[0].data.double()
    with pytest.raises(GradientError, match=r"'p0' was torch\.float32 on cpu at initialize"):
        reducer.prepare(last=True)


def test_parameters_without_elements_take_part():
    reducer, parameters = alone(0)
    reducer.prepare(last=True)
    backward(parameters)
    reducer.wait()
    assert parameters[0].grad is not None


@pytest.mark.parametrize("change", [None, "written", "replaced", "taken", "given"])
def test_gradients_that_are_changed_between_backward_and_step_are_refused(change):
    reducer, (first, second) = alone(8, 8)
    for _ in range(2):
        first.grad = second.grad = None
        reducer.prepare(last=True)
        backward((first,) if change == "given" else (first, second))
        reducer.end_backward()
    match change:
        case "written":
            second.grad.mul_(2)
        case "replaced":
            second.grad = second.grad.clone()
        case "taken":
            second.grad = None
        case "given":
            second.grad = torch.ones(8)
    if change is None:
        reducer.check_untouched()
    else:
        with pytest.raises(GradientError, match="the gradient of 'p1' was changed between backward and step"):
            reducer.check_untouched()
    reducer.check_untouched()  # asked once: from then on handlers may write
    reducer.wait()


def test_gradients_of_a_pass_that_nobody_prepared_have_strayed_where_others_wait_for_them():
    reducer, parameters = alone(8)
    for prepared in (True, False):  # first while the order is recorded, then not
        for others in (False, True):
            (state,) = reducer._states
            state.group.size = 2 if others else 1
            parameters[0].grad = None
            if prepared:
                reducer.prepare(last=True)
            backward(parameters)
            assert reducer.unprepared_gradients is (others and not prepared)
            state.group.size = 1
            if prepared:
                reducer.wait()
    reducer.prepare(last=True)
    assert not reducer.unprepared_gradients


def test_a_rank_that_fails_drops_its_gradients_and_goes_on():
    reducer, parameters = alone(8, 8)
    reducer.prepare(last=False)
    backward(parameters)
    reducer.fail("why")
    outcome = reducer.wait()
    assert (outcome.failed_ranks, outcome.reasons) == ([0], {0: "why"})
    assert [parameter.grad for parameter in parameters] == [None, None]
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = None
        reducer.prepare(last=True)
        backward(parameters)
        assert reducer.wait() == StepOutcome(None, [])
        assert all(parameter.grad.tolist() == [2.0] * 8 for parameter in parameters)


@pytest.mark.parametrize(
    "sharding", [Sharding(), Sharding(keep_full=False, every_pass=True), Sharding(keep_full=False)]
)
@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_of_a_sharded_sum_the_slices_are_the_result_of_all_passes(sharding, failed, ends):
    reducer, parameters = alone(8, 8, 8, sharding=sharding)
    for step in range(3):
        for last in (False, True):
            reducer.prepare(last)
            backward(parameters)
            if ends:
                reducer.end_backward()
        if failed and step == 1:
            reducer.fail()
        reducer.wait(0.5 if step == 2 else None)
        assert all(parameter.grad is None for parameter in parameters)
        assert not any(bucket.started or bucket.shard.landed for bucket in reducer.buckets)
        if not (failed and step == 1):
            expected = 4.0 * (0.5 if step == 2 else 1.0)
            for bucket in reducer.buckets:
                found = [bucket.gradient[span.at : span.at + span.numel] for span in bucket.spans]
                assert [part.unique().tolist() for part in found] == [[expected]] * len(found)


def test_whole_gradients_are_given_back_where_they_are_wanted():
    reducer, parameters = alone(8, 8, 8, sharding=Sharding(give_back=True))
    reducer.prepare(last=True)
    backward(parameters[:2])
    reducer.wait()
    assert [None if p.grad is None else p.grad.unique().tolist() for p in parameters] == [[2.0], [2.0], None]


def test_frozen_and_thawed_parameters_lay_the_buckets_out_anew():
    reducer, parameters = alone(8, 8, 8)
    for step, thawed in enumerate([True, True, False, False, True]):
        parameters[1].requires_grad_(thawed)
        for parameter in parameters:
            parameter.grad = None
        reducer.prepare(last=True)
        backward(tuple(parameter for parameter in parameters if parameter.requires_grad))
        reducer.wait()
        assert reducer.generation == [0, 0, 1, 1, 2][step]
        assert parameters[0].grad.tolist() == [2.0] * 8
    assert sorted(name for bucket in reducer.buckets for name in bucket.names) == ["p0", "p1", "p2"]


def test_no_numbers_are_carried_where_no_bucket_goes_to_the_world():
    reducer, _ = alone(8)
    assert not reducer.carry(torch.ones(2), lambda numbers: numbers[0])
    assert reducer._scale_of is None
    assert (reducer._first_to_all, reducer._last_to_all) == (None, None)


def test_a_step_that_flags_dropped_is_logged():
    said: list[str] = []
    parameters = (nn.Parameter(torch.zeros(8)),)
    reducer = Synchroniser([Sum(("p0",), parameters, (0,), None, 2.0, SMALL)], log=said.append)
    flags = PiggybackedFlags(torch.device("cpu"))
    reducer.agree_by(flags)
    unsteady = []
    for step in range(7):
        parameters[0].grad = None
        reducer.prepare(last=True)
        if step != 4:
            backward(parameters)
        outcome = reducer.wait()
        assert outcome.drop_flag is None  # no bucket carried it
        unsteady.append(outcome.unsent_flags[:2].tolist())
        flags.take(outcome.unsent_flags)
    # Unsteady while it learns; in step 4 it is steady, and deviates; from then on it is noted.
    assert unsteady == [[0, 1], [0, 0], [0, 0], [0, 0], [1, 0], [0, 0], [0, 0]]
    assert [text[:18] for text in said] == ["step 4 was skipped"]


def test_closing_takes_the_hooks_and_the_connections_away():
    reducer, parameters = alone(8)
    closed: list[bool] = []
    (group,) = reducer.groups.values()
    group.sockets = SimpleNamespace(close=lambda: closed.append(True))  # type: ignore[assignment]
    reducer.close()
    assert closed == [True]
    backward(parameters)
    assert parameters[0].grad is not reducer.buckets[0].grads[0]
