"""The synchroniser on a GPU: right over NCCL and gloo, and never waiting for the device once it is under way.

One GPU is enough: two ranks share it, and a different NCCL_HOSTID on each makes NCCL accept that.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.gradients.summing import TINY, both, data, mean_loss, reduce_all, same_gradients
from tests.ranks import on_ranks

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.slow]

OPTIONS: list[tuple[dict[str, Any], float]] = [
    ({}, 1e-12),
    ({"overlap": False}, 1e-12),
    ({"fixed_order": True}, 1e-12),
    ({"compress": torch.bfloat16}, 3e-2),
]


def _start(backend: str) -> None:
    rank = int(os.environ["RANK"])
    os.environ["NCCL_HOSTID"] = f"host-{rank}"
    torch.cuda.set_device(0)
    dist.init_process_group(backend, device_id=torch.device("cuda", 0) if "nccl" in backend else None)


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3)).cuda()


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", "gloo"])
@on_ranks(2, backend=None, timeout=110)
def test_equal_to_one_process_and_no_wait_for_the_device(backend: str):
    _start(backend)
    for changes, tolerance in OPTIONS:
        model, truth = both(_net)
        inputs = {(rank, step): data(rank, step, 5, 6).cuda() for rank in range(2) for step in range(6)}

        def square(one: nn.Module, rank: int, step: int, inputs: dict[tuple[int, int], Tensor] = inputs) -> Tensor:
            return one(inputs[rank, step]).square().mean()

        reducer = reduce_all(model, TINY, **changes)
        for step in range(5):
            model.zero_grad()
            truth.zero_grad()
            if step >= 3 and "nccl" in backend:
                torch.cuda.set_sync_debug_mode("error")
            for micro in range(2):
                loss = square(model, dist.get_rank(), step + micro)
                reducer.prepare(last=micro == 1)
                loss.backward()
            reducer.wait(torch.ones((), device="cuda", dtype=torch.float64) if step == 4 else None)
            torch.cuda.set_sync_debug_mode("default")
            for micro in range(2):
                mean_loss(truth, square, step + micro).backward()
            same_gradients(model, truth, tolerance)


@on_ranks(2, backend=None, timeout=110)
def test_bf16_gradients_are_summed_in_fp32():
    _start("nccl")
    parameter = nn.Parameter(torch.zeros(70, dtype=torch.bfloat16, device="cuda"))
    reducer = reduce_all(nn.ParameterList([parameter]), TINY, reduce_dtype=torch.float32)
    for _ in range(3):
        parameter.grad = None
        reducer.prepare(last=True)
        parameter.backward(torch.full_like(parameter, 256.0 if dist.get_rank() == 0 else 3.0))
        reducer.wait()
    # 259 is no bf16 number: a sum in bf16 would round it to 260 and give 130.
    assert bool((parameter.grad == 129.5).all())
