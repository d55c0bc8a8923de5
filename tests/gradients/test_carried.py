"""Counts of losses that travel with the last gradients: no collective of their own, and the mean of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from colonnade.comm.torch_versions import noting_collectives
from colonnade.engine.stepper import Stepper
from colonnade.testing import run_world
from tests.engine.twins import twins
from tests.gradients.scenarios import numbers
from tests.gradients.summing import on_the_cpu
from tests.ranks import on_ranks

STEPS = 7
CONFIG = {"clip_grad_norm": 0.1, "sync": {"shared_memory": False, "bucket_mb": 1e-4, "first_bucket_mb": 1e-4}}


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def _rows(rank: int, step: int) -> int:
    """Unequal on the ranks, and none on one of them now and then."""
    return (step + 3 * rank) % 5


def _loss(model: Any, rank: int, step: int) -> tuple[torch.Tensor, int]:
    rows = _rows(rank, step)
    return model(numbers(5, 4, seed=10 * step + rank))[:rows].square().sum(), rows


@contextmanager
def _counted_calls(into: list[int]) -> Iterator[None]:
    seen: list[str] = []
    with noting_collectives(lambda name, group, given: seen.append(name)):
        yield
    into.append(len(seen))


def _trains(counted: bool, flags: bool, changes: dict[str, Any]) -> list[int]:
    """Returns how many collectives each step took."""
    if flags:
        Stepper._piggybacked_flags = on_the_cpu  # type: ignore[method-assign]
    calls: list[int] = []

    def loss(model: Any, rank: int, at: int) -> Any:
        return _loss(model, rank, at) if counted else _loss(model, rank, at)[0] / 7

    with twins({**CONFIG, **changes}, _net, lambda model: torch.optim.AdamW(model.parameters(), lr=0.1)) as both:
        for step in range(STEPS):
            passes = range(2 * step, 2 * step + both.engine.accumulation)
            with _counted_calls(calls):
                both.engine.zero_grad()
                for at in passes:
                    both.engine.backward(loss(both.engine, both.rank, at))
                    both.engine.step()
            both.follow(loss, *passes)
    return calls


@pytest.mark.parametrize("flags", [False, True], ids=["agree", "ride"])
@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation": 2}], ids=str)
@on_ranks(2)
def test_a_counted_loss_costs_no_collective_more_than_a_mean(flags: bool, changes: dict[str, Any]):
    counted, mean = (_trains(form, flags, changes) for form in (True, False))
    assert counted[4:] == mean[4:]


def _fail(grad: torch.Tensor) -> None:
    raise RuntimeError("on purpose")


@on_ranks(2)
def test_ranks_that_give_up_a_step_or_run_out_of_batches_do_not_keep_the_others_waiting():
    """Rank 1 fails in the first of two passes, and later runs out of batches; one process knows of neither."""
    config = {"gradient_accumulation": 2, "sync": CONFIG["sync"]}
    with twins(config, _net, lambda model: torch.optim.SGD(model.parameters(), lr=0.1)) as both:
        rank, engine = both.rank, both.engine
        for step in range(5):
            engine.zero_grad()
            for at in (0, 1) if rank == 0 or step != 3 else (0,):
                total, rows = _loss(engine, rank, 2 * step + at)
                if step == 3 and rank == 1:
                    total.register_hook(_fail)
                    with pytest.raises(RuntimeError, match="on purpose"):
                        engine.backward((total, rows))
                    engine.zero_grad()
                else:
                    engine.backward((total, rows))
                    engine.step()
            if step != 3:
                both.follow(_loss, 2 * step, 2 * step + 1)
        places = [(r, 20 + at) for r in range(2) for at in range(4 - 2 * r)]
        for r, at in engine.batches([place for place in places if place[0] == rank]):
            engine.zero_grad()
            engine.backward(_loss(engine, r, at))
            engine.step()
        for first in (20, 22):
            both.follow(_loss, places=[(r, at) for r, at in places if first <= at < first + 2])
        assert engine.skipped_steps == 1


@pytest.mark.parametrize("changes", [{"zero": 1}, {"sync": {"shared_memory": False, "fixed_order": True}}], ids=str)
def test_where_no_bucket_can_carry_them_counts_go_by_themselves(changes):
    run_world(2, _trains, True, False, changes)
