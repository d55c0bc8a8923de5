"""Dropped steps: counted once each, read late, and no reason for a scheduler to go on."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from colonnade._launch import launch
from colonnade.comm.messages import HostCopy
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.engine.stepper import SkipAwareScheduler, SkipReport
from colonnade.testing import run_world
from tests.optim.watch import Operations


def test_a_flag_is_read_once() -> None:
    report = SkipReport()
    assert report.read() == 0
    report.note(torch.tensor(1.0))
    assert report.read() == 1
    assert report.read() == 0
    assert (report.total, report.last) == (1, True)


def test_a_flag_that_nobody_read_counts_when_the_next_one_comes() -> None:
    report = SkipReport()
    for flag in (1.0, 0.0, 1.0, 1.0, 0.0):
        report.note(torch.tensor(flag))
    assert (report.total, report.last) == (3, True)  # the last flag is still on its way
    assert report.poll() == 0
    assert (report.total, report.last) == (3, False)


def test_noting_a_step_reads_nothing_of_that_step() -> None:
    report, flag = SkipReport(), torch.tensor(1.0)
    with Operations() as seen:
        report.note(flag)
    assert seen.host_reads == 0


class Engine:
    """All that the scheduler asks of an engine."""

    last_skip_flag: Any = None


class Late:
    """A flag of a device, which comes to the host after some steps, on one rank sooner than on another."""

    on_host = False

    def __init__(self, dropped: bool, comes_at_once: bool) -> None:
        self.dropped, self.here = dropped, comes_at_once

    def ready(self) -> bool:
        return self.here

    def read(self) -> float:
        return float(self.dropped)


def scheduler() -> tuple[SkipAwareScheduler, Any, Engine]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    inner = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.step()
    engine = Engine()
    return SkipAwareScheduler(inner, engine), inner, engine


def test_a_scheduler_stands_still_after_a_dropped_step() -> None:
    wrapped, inner, engine = scheduler()
    rates = []
    for skipped in (False, True, True, False):
        engine.last_skip_flag = HostCopy(torch.tensor(float(skipped)))
        wrapped.step()
        rates.append(wrapped.get_last_lr()[0])
    assert rates == [0.5, 0.5, 0.5, 0.25]
    assert wrapped.last_epoch == inner.last_epoch == 2


@pytest.mark.parametrize("comes_at_once", [False, True])
def test_on_a_device_every_rank_makes_up_for_a_dropped_step_at_the_same_call(comes_at_once: bool) -> None:
    wrapped, inner, engine = scheduler()
    seen = []
    for dropped in (True, False, False, True, False, False, False):
        engine.last_skip_flag = Late(dropped, comes_at_once)
        wrapped.step()
        seen.append(inner.last_epoch)
    assert seen == [1, 2, 2, 3, 4, 4, 5], "whatever has come to this host"


def test_it_is_the_users_scheduler_in_all_else() -> None:
    wrapped, inner, _ = scheduler()
    wrapped.step()
    state = wrapped.state_dict()
    assert state == inner.state_dict()
    wrapped.step()
    wrapped.load_state_dict(state)
    assert inner.last_epoch == 1
    assert wrapped.gamma == 0.5
    with pytest.raises(AttributeError, match="no_such_thing"):
        wrapped.no_such_thing  # noqa: B018


def test_a_metric_is_passed_on() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    inner = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    wrapped = SkipAwareScheduler(inner, Engine())
    for loss in (1.0, 2.0):
        wrapped.step(loss)
    assert inner.num_bad_epochs == 0
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_it_can_be_copied_and_pickled() -> None:
    wrapped, _, _ = scheduler()
    wrapped.step()
    for other in (copy.copy(wrapped), copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert type(other) is SkipAwareScheduler
        assert other.get_last_lr() == [0.5]


# -- on an engine -----------------------------------------------------------------------------------------


def _train(accumulation: int) -> dict[str, Any]:
    """Six steps on two ranks, the third and the fourth bad on one of them."""
    config = {"clip_grad_norm": 1.0, "gradient_accumulation": accumulation}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        inner = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        engine, _, _, wrapped = initialize(model, optimizer, lr_scheduler=inner, context=gpc)
        seen: dict[str, Any] = {"skipped": [], "rates": [], "kind": type(wrapped).__name__}
        for step in range(6):
            for micro in range(accumulation):
                bad = step in (2, 3) and micro == 0 and gpc.get_global_rank() == 1
                engine.zero_grad()
                engine.backward(engine(torch.ones(2, 3) * (math.inf if bad else 1.0)).square().mean())
                engine.step()
            seen["skipped"].append(engine.last_step_skipped)
            wrapped.step()
            seen["rates"].append(wrapped.get_last_lr()[0])
        seen["total"] = engine.skipped_steps
        seen["steps"] = {int(state["step"]) for state in optimizer.state_dict()["state"].values()}
        engine.close()
        return seen


@pytest.mark.parametrize("accumulation", [1, 2])
def test_dropped_steps_are_counted_alike_on_every_rank_and_by_the_optimizer(accumulation: int) -> None:
    first, second = run_world(2, _train, accumulation, env={"CUDA_VISIBLE_DEVICES": ""}).values
    assert first == second
    assert first == {
        "skipped": [False, False, True, True, False, False],
        "rates": [0.5, 0.25, 0.25, 0.25, 0.125, 0.0625],
        "kind": "SkipAwareScheduler",
        "total": 2,
        "steps": {4},
    }


def test_without_clipping_the_scheduler_is_the_users_own() -> None:
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        inner = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model = nn.Linear(1, 1)
        engine, _, _, got = initialize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lr_scheduler=inner, context=gpc
        )
        assert got is inner
        assert engine.last_step_skipped is False
        assert engine.skipped_steps == 0
        assert (engine.grad_norm, engine.clip_divisor, engine.grad_norms()) == (None, None, {})
        engine.close()
