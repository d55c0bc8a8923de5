"""Options of the transports: dtypes of sum and wire, fixed order, compression, overlap, callback."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.engine.gradient_handler._options import PowerSGD
from colonnade.engine.gradient_handler._reducer import SyncOptions
from colonnade.errors import ConfigError
from colonnade.testing import run_world
from tests.engine.gradient_handler.reducing import LARGE, TINY, both, data, everywhere, reduce_all, train

GLOO = {"shared_memory": False}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))


def square(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(data(rank, step, 5, 6)).square().mean()


def reduced(grads: list[Tensor], steps: int = 3, **changes: Any) -> tuple[list[Tensor], Any]:
    """What becomes of these gradients, given the same in every step."""
    parameters = nn.ParameterList([nn.Parameter(torch.zeros_like(grad)) for grad in grads])
    reducer = reduce_all(parameters, TINY, **changes)
    for _ in range(steps):
        reducer.prepare(last=True)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = None
            parameter.backward(grad)
        reducer.wait()
    return [parameter.grad.clone() for parameter in parameters], reducer


def gathered(grad: Tensor) -> list[Tensor]:
    every = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
    dist.all_gather(every, grad)
    return every


def _all_options_in_fp64() -> None:
    for changes in ({"fixed_order": True}, {"reduce_dtype": torch.float32}, {"fixed_order": True, "overlap": True}):
        everywhere(partial(train, net, square), [({**changes, **GLOO}, LARGE), (changes, LARGE)])


def test_options_that_do_not_round_are_exact():
    run_world(4, _all_options_in_fp64)


def _bf16_in_fp32() -> None:
    """Small numbers beside a large one: lost in bf16 sums, kept in fp32 ones."""
    rank, size = dist.get_rank(), dist.get_world_size()
    grad = torch.full((70,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    exact = torch.full((70,), (256.0 + size - 1) / size, dtype=torch.float64).bfloat16()
    for shared in (True, False):
        (kept,), _ = reduced([grad], reduce_dtype=torch.float32, shared_memory=shared)
        assert torch.equal(kept, exact)
        assert kept.dtype == torch.bfloat16
        (lost,), _ = reduced([grad], shared_memory=shared)
        assert not torch.equal(lost, exact)


def test_bf16_gradients_are_summed_in_fp32_if_asked():
    run_world(4, _bf16_in_fp32)


def _fp16_does_not_overflow() -> None:
    grad = torch.full((40,), 60000.0, dtype=torch.float16)
    for shared in (True, False):
        (mean,), _ = reduced([grad], shared_memory=shared)
        assert torch.equal(mean, grad)


def test_fp16_gradients_do_not_overflow_in_the_sum():
    run_world(4, _fp16_does_not_overflow)


def _compressed(kind: str, tolerance: float) -> None:
    torch.manual_seed(dist.get_rank())
    grad = torch.randn(300)
    exact = torch.stack(gathered(grad)).double().mean(0)
    (got,), _ = reduced([grad], compress=kind, **GLOO)
    error = ((got - exact).abs() / exact.abs().clamp_min(0.1)).max()
    assert 1e-6 < error < tolerance
    assert torch.equal(gathered(got)[0], got)
    said: list[str] = []
    parameters = nn.ParameterList([nn.Parameter(torch.zeros_like(grad))])
    reduce_all(parameters, TINY, said.append, compress=kind, shared_memory=True)
    assert "not used in shared memory" in said[0]


@pytest.mark.parametrize(("kind", "tolerance"), [("bf16", 0.05), ("fp16", 0.01)])
def test_compressed_gradients_are_near_and_the_same_on_all_ranks(kind, tolerance):
    run_world(4, _compressed, kind, tolerance)


def _bits(numels: list[int]) -> None:
    torch.manual_seed(dist.get_rank())
    grads = [torch.randn(numel) for numel in numels]
    rows = [torch.stack(gathered(grad)) for grad in grads]
    in_order = [sum(row[1:], row[0]) * (1.0 / dist.get_world_size()) for row in rows]
    for changes in (
        {"shared_memory": True},
        {"shared_memory": True, "bucket_mb": 1.0},
        {"fixed_order": True, **GLOO},
        {"fixed_order": True, "bucket_mb": 1.0, **GLOO},
        {"fixed_order": True, "bucket_mb": 1e-5, "overlap": False, **GLOO},
    ):
        got, _ = reduced(grads, **changes)
        for one, expected in zip(got, in_order, strict=True):
            assert torch.equal(one, expected), changes


def test_bits_do_not_depend_on_bucket_sizes_in_shared_memory_nor_with_fixed_order():
    run_world(4, _bits, [5, 1000, 33, 64, 257, 3000])


def _low_rank() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10)
    left, right, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((20, 2), (2, 30), (7,)))
    # Every rank's matrix is in one space of rank 2, so that two columns hold the sum exactly.
    matrix = (rank + 1) * left @ right
    settings = {"type": "powersgd", "rank": 2, "start_step": 0}
    (got, vector), _ = reduced([matrix, bias * rank], compress=settings, steps=3, **GLOO)
    mean = (size + 1) / 2
    assert (got - mean * left @ right).abs().max() < 1e-10
    assert (vector - bias * (size - 1) / 2).abs().max() < 1e-12
    assert torch.equal(gathered(got)[0], got)


def test_powersgd_is_exact_where_the_gradient_is_of_low_rank():
    run_world(4, _low_rank)


def _error_feedback() -> None:
    """What one step leaves out comes later: the mean over many steps goes to the gradient."""
    torch.manual_seed(dist.get_rank())
    grad = torch.randn(16, 24, dtype=torch.float64)
    exact = torch.stack(gathered(grad)).mean(0)
    parameter = nn.Parameter(torch.zeros_like(grad))
    reducer = reduce_all(
        nn.ParameterList([parameter]), TINY, compress={"type": "powersgd", "rank": 1, "start_step": 2}, **GLOO
    )
    total, errors = torch.zeros_like(grad), []
    for step in range(60):
        reducer.prepare(last=True)
        parameter.grad = None
        parameter.backward(grad)
        reducer.wait()
        if step < 2:
            assert (parameter.grad - exact).abs().max() < 1e-12
        if step >= 3:
            total += parameter.grad
            errors.append(((total / (step - 2) - exact).norm() / exact.norm()).item())
    assert errors[0] > 0.5
    assert errors[-1] < 0.25


def test_powersgd_feeds_its_error_back_and_starts_when_told():
    run_world(2, _error_feedback)


def _callback() -> None:
    for changes in ({"shared_memory": True}, GLOO):
        seen: list[tuple[tuple[str, ...], Tensor]] = []
        model, _ = both(net)
        reducer = reduce_all(
            model, TINY, callback=lambda flat, names, seen=seen: seen.append((names, flat.mul_(2))), **changes
        )
        for step in range(2):
            seen.clear()
            model.zero_grad()
            reducer.prepare(last=True)
            square(model, dist.get_rank(), step).backward()
            reducer.wait()
        assert [names for names, _ in seen] == [plan.names for plan in reducer.plan()]
        for bucket, (_, flat) in zip(reducer.buckets, seen, strict=True):
            assert flat.data_ptr() == bucket.buffer.data_ptr()
        (plain, _), fresh = both(net), []
        for rank in range(2):
            plain.zero_grad()
            square(plain, rank, 1).backward()
            fresh.append([p.grad.clone() for p in plain.parameters()])
        for parameter, one, two in zip(model.parameters(), *fresh, strict=True):
            assert (parameter.grad - (one + two)).abs().max() < 1e-12


def test_the_callback_sees_every_reduced_bucket_once_and_may_change_it():
    run_world(2, _callback)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"bucket_mb": 0}, "more than 0"),
        ({"overlap": "yes"}, '"auto"'),
        ({"reduce_dtype": torch.int32}, "floating point"),
        ({"compress": "bf61"}, "Did you mean 'bf16'"),
        ({"compress": {"type": "powersgd", "rnak": 3}}, "Did you mean 'rank'"),
        ({"compress": {"type": "powersgd", "rank": 0}}, "rank >= 1"),
    ],
    ids=str,
)
def test_options_that_cannot_be_used_say_what_can(given, hint):
    with pytest.raises(ConfigError, match=hint):
        SyncOptions(**given)


def test_options_can_be_compared_and_hashed():
    first, second = (SyncOptions(compress={"type": "powersgd", "rank": 3}) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first.compression == PowerSGD(rank=3)
    assert SyncOptions(compress="bf16").compression is torch.bfloat16
    assert SyncOptions(compress=PowerSGD()).compression == PowerSGD()
