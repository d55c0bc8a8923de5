"""Shared memory: agreed fallbacks, what a crash leaves behind, and what a missing rank leads to."""

from __future__ import annotations

import os
import resource
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colonnade.comm import groups
from colonnade.errors import GradientError
from colonnade.gradients.sums import Sum
from colonnade.gradients.synchroniser import Synchroniser
from colonnade.testing import run_world
from tests.gradients.summing import TINY, data, reduce_all


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).double()


def _step(model: nn.Module, reducer: Synchroniser, step: int = 0) -> None:
    model.zero_grad()
    reducer.prepare(last=True)
    model(data(dist.get_rank(), step, 5, 64)).square().mean().backward()
    reducer.wait()


def _transport(shared: object, spoil: str) -> tuple[str, list[str]]:
    if dist.get_rank() == 1 and spoil == "memory":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    if dist.get_rank() == 1 and spoil == "host":
        groups.host_identity = lambda: "another host"
    if dist.get_rank() == 1 and spoil == "system":
        groups.host_identity = lambda: None
    said: list[str] = []
    model = _model()
    reducer = reduce_all(model, TINY, said.append, shared_memory=shared)
    for step in range(2):
        _step(model, reducer, step)
    return reducer.buckets[0].transport.name, said


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ("memory", "MiB of shared memory cannot be allocated"),
        ("host", "2 hosts"),
        ("system", "rank 1 runs on a system"),
    ],
)
def test_all_ranks_fall_back_together_and_say_why(spoil, reason):
    for transport, said in run_world(2, _transport, "auto", spoil).values:
        assert transport == "process group"
        assert len(said) == 1
        assert reason in said[0]


def test_it_is_used_by_itself_where_it_can_be():
    assert run_world(2, _transport, "auto", "").values == [("shared memory", [])] * 2


@pytest.mark.parametrize("spoil", ["memory", "host"])
def test_asked_for_and_not_to_be_had_is_an_error_on_every_rank(spoil):
    outcomes = run_world(2, _transport, True, spoil, check=False).outcomes
    assert [outcome.type for outcome in outcomes] == ["colonnade.errors.GradientError"] * 2
    assert all("shared_memory=True is not possible, because" in outcome.message for outcome in outcomes)


def _one_dies(folder: str, where: str) -> str:
    model = _model()
    reducer = reduce_all(model, TINY, shared_memory=True)
    for step in range(3):
        _step(model, reducer, step)
    rank = dist.get_rank()
    Path(folder, str(rank)).write_text(str(os.getpid()))
    reducer.prepare(last=True)
    model(data(rank, 0, 5, 64)).square().mean().backward()
    if rank == 1:
        if where == "mid-reduce":
            task = reducer.buckets[1].transport
            task.finish = lambda factor: os.kill(os.getpid(), signal.SIGKILL)
            reducer.wait()
        # The others have sent their word by now, and wait for this rank's.
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        reducer.wait()
    except GradientError as error:
        assert time.monotonic() - begin < 5
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("where", ["before", "mid-reduce"])
def test_a_killed_rank_is_named_and_leaves_nothing_behind(where, tmp_path):
    before = set(os.listdir("/dev/shm"))
    result = run_world(4, _one_dies, str(tmp_path), where, check=False)
    assert result.outcomes[1].signal == "SIGKILL"
    for rank in (0, 2, 3):
        assert "rank 1 left during the gradient synchronisation" in result.values[rank], result.outcomes[rank]
    # Other processes of the machine may put files there in the meantime; ours would have this name.
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "colonnade" in name]
    for rank in range(4):
        maps = Path(f"/proc/{(tmp_path / str(rank)).read_text()}/maps")
        assert not maps.exists() or "colonnade-shared" not in maps.read_text()


def _silent() -> str:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    names, parameters = zip(*_model().named_parameters(), strict=True)
    reducer = Synchroniser([Sum(names, parameters, (0, 1), group, 2.0, TINY)])
    if dist.get_rank() == 1:
        time.sleep(3.5)
        return "slept"
    try:
        reducer.wait()
    except GradientError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_at_the_groups_timeout():
    said, _ = run_world(2, _silent).values
    assert "rank 1 did not come" in said
    assert "within 2 s" in said


def _skips() -> str:
    model = _model()
    reducer = reduce_all(model, TINY, shared_memory=True)
    _step(model, reducer)
    try:
        if dist.get_rank() == 1:
            reducer._step += 1
        _step(model, reducer)
    except GradientError as error:
        return str(error)
    return "nothing was raised"


def test_ranks_at_different_steps_are_named_before_a_wrong_sum_is_used():
    for said in run_world(2, _skips).values:
        assert "rank 0: 1, rank 1: 2" in said


def _stress(rounds: int) -> None:
    """Ranks at random speeds, new numbers every round, every sum exact."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parameter = nn.Parameter(torch.zeros(50_000, dtype=torch.float64))
    reducer = reduce_all(nn.ParameterList([parameter]), TINY, shared_memory=True)
    pause = torch.Generator().manual_seed(rank)
    for step in range(rounds):
        if torch.rand((), generator=pause) < 0.3:
            time.sleep(float(torch.rand((), generator=pause)) * 2e-3)
        reducer.prepare(last=True)
        parameter.grad = None
        parameter.backward(torch.full_like(parameter, float(step * size + rank)))
        reducer.wait()
        mean = step * size + (size - 1) / 2
        assert bool((parameter.grad == mean).all()), step
        parameter.grad.fill_(-1.0)


def test_no_rank_sees_old_or_half_written_numbers():
    run_world(4, _stress, 150)


@pytest.mark.long
def test_no_rank_sees_old_or_half_written_numbers_for_long():
    run_world(4, _stress, 4000, timeout=110)
