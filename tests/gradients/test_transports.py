"""Options of the transports: dtypes of sum and wire, fixed order, compression, overlap."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.gradients.summing import LARGE, TINY, data, everywhere, reduce_all, train
from tests.ranks import on_ranks

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


@on_ranks(4)
def test_options_that_do_not_round_are_exact():
    for changes in ({"fixed_order": True}, {"reduce_dtype": torch.float32}, {"fixed_order": True, "overlap": True}):
        everywhere(partial(train, net, square), [({**changes, **GLOO}, LARGE), (changes, LARGE)])


@on_ranks(4)
def test_bf16_gradients_are_summed_in_fp32_if_asked():
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


@on_ranks(4)
def test_fp16_gradients_do_not_overflow_in_the_sum():
    grad = torch.full((40,), 60000.0, dtype=torch.float16)
    for shared in (True, False):
        (mean,), _ = reduced([grad], shared_memory=shared)
        assert torch.equal(mean, grad)


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
@on_ranks(4)
def test_compressed_gradients_are_near_and_the_same_on_all_ranks(kind: torch.dtype, tolerance: float):
    torch.manual_seed(dist.get_rank())
    grad = torch.randn(300)
    exact = torch.stack(gathered(grad)).double().mean(0)
    for key in ("compress", "reduce_dtype"):
        (got,), _ = reduced([grad], **{key: kind}, **GLOO)
        error = ((got - exact).abs() / exact.abs().clamp_min(0.1)).max()
        assert 1e-6 < error < tolerance
        assert torch.equal(gathered(got)[0], got)
        said: list[str] = []
        parameters = nn.ParameterList([nn.Parameter(torch.zeros_like(grad))])
        reduce_all(parameters, TINY, said.append, **{key: kind}, shared_memory=True)
        assert "no effect in shared memory" in said[0]


@on_ranks(4)
def test_bits_do_not_depend_on_bucket_sizes_in_shared_memory_nor_with_fixed_order():
    numels = [5, 1000, 33, 64, 257, 3000]
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
