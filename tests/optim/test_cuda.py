"""The Triton kernels against torch on a GPU; nothing here runs without one."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from colonnade.errors import GradientError
from colonnade.optim.bucket_step import ScaledStep
from colonnade.optim.clip import CLIP_METHOD, ClipPolicy, NormClip
from colonnade.optim.norm import GradientBlock, Meter, powsums, reduce_norms
from colonnade.testing import run_world
from tests.optim.flat import Pair
from tests.optim.test_flat_step import momentum_groups

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MAKERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "adamw": partial(AdamW, lr=1e-2, weight_decay=0.1, fused=True),
    "adamw-plain": partial(AdamW, lr=1e-2),
    "adam": partial(Adam, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), fused=True),
    "sgd": partial(SGD, lr=1e-2, fused=True),
    "sgd-nesterov": partial(SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    "sgd-dampening": partial(SGD, lr=1e-2, momentum=0.9, dampening=0.5, weight_decay=0.1),
}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-12}


# torch's plain optimizers round half precision more often than its fused ones and ours.
COMPARED = [(n, d) for n in MAKERS for d in TOLERANCE if d.itemsize > 2 or n not in ("adamw-plain", "sgd-dampening")]


@pytest.mark.parametrize(("name", "dtype"), COMPARED, ids=str)
def test_equals_torch(name: str, dtype: torch.dtype) -> None:
    pair = Pair(MAKERS[name], dtype, "cuda")
    for _ in range(5):
        pair.step()
    pair.compare(TOLERANCE[dtype], TOLERANCE[dtype] / 10)


def test_missing_gradients_and_skipped_steps() -> None:
    pair = Pair(MAKERS["adamw"], device="cuda")
    for absent in ([], [1, 2], [], [5], []):
        pair.step(absent)
    before = [param.clone() for param in pair.ours]
    pair.gradients(scale=math.inf)
    decision = pair.decide()
    pair.flat.step(decision.divisor, decision.found_inf)
    assert all(torch.equal(one, other) for one, other in zip(before, pair.ours, strict=True))
    pair.step()
    pair.compare(2e-6, 2e-7)


def test_momentum_that_differs_by_group_and_begins_later() -> None:
    pair = Pair(momentum_groups, device="cuda")
    pair.step()
    pair.step([1])
    for optimizer in (pair.torch, pair.optimizer):
        optimizer.param_groups[1].update(momentum=0.8, dampening=0.3)
    for absent in ([], [4], []):
        pair.step(absent)
    pair.compare(2e-6, 2e-7)


def test_lr_in_device_memory() -> None:
    lr = torch.tensor(1e-2, device="cuda")
    pair = Pair(partial(AdamW, lr=lr, fused=True), device="cuda")
    pair.step()
    lr.fill_(3e-2)
    pair.step()
    pair.compare(2e-6, 2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_of_slots(dtype: torch.dtype) -> None:
    buffer = torch.randn(3_000_000, device="cuda").to(dtype)
    cuts = [0, 8, 70_000, 70_000, 1_000_064, 3_000_000]
    blocks = [GradientBlock(buffer[a:b], slot=i) for i, (a, b) in enumerate(pairwise(cuts))]
    meter = Meter(blocks, slots=5)
    norms = reduce_norms(meter.measure()).per_slot()
    wanted = torch.stack([block.tensor.double().norm() for block in blocks])
    torch.testing.assert_close(norms, wanted, rtol=1e-7, atol=0)
    torch.testing.assert_close(reduce_norms(powsums(blocks, slots=5)).per_slot(), wanted, rtol=1e-6, atol=0)
    buffer[80_000] = math.nan
    again = reduce_norms(meter.measure())
    assert again.nonfinite.tolist() == [0, 0, 0, 1, 0]


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 2.5, math.inf])
def test_orders(p: float) -> None:
    tensors = [torch.randn(n, device="cuda") for n in (5, 1000, 70_001)]
    norms = reduce_norms(powsums([GradientBlock(t) for t in tensors], p), p)
    wanted = torch.linalg.vector_norm(torch.cat(tensors).double(), p)
    torch.testing.assert_close(norms.total(), wanted, rtol=2e-6, atol=0)


def world_on_one_gpu() -> tuple[float, float]:
    source = torch.Generator(device="cuda").manual_seed(3)
    shared = torch.randn(100_000, device="cuda", generator=source)
    own = [torch.randn(size, device="cuda", generator=source) for size in (64, 5000)]
    rank = dist.get_rank()
    meter = Meter([GradientBlock(shared, 2, rank), GradientBlock(own[rank])])
    norm = reduce_norms(meter.measure()).total()
    return norm.item(), torch.cat([shared, *own]).double().norm().item()


def test_two_ranks_on_one_gpu() -> None:
    (first, wanted), (second, _) = run_world(2, world_on_one_gpu).values
    assert first == second == pytest.approx(wanted, rel=1e-7)


def test_raise_policy_reads_the_second_step_before() -> None:
    policy = ClipPolicy(NormClip(1.0), nonfinite="raise")
    grad = torch.randn(5000, device="cuda")
    meter = Meter([GradientBlock(grad[:4992])])
    policy.decide(reduce_norms(meter.measure()))
    grad[7] = math.inf
    assert policy.decide(reduce_norms(meter.measure())).found_inf.item() == 1.0
    policy.decide(reduce_norms(meter.measure()))
    with pytest.raises(GradientError, match="not finite, in: all"):
        policy.decide(reduce_norms(meter.measure()))


@pytest.mark.parametrize("name", CLIP_METHOD)
def test_every_method_without_a_wait_and_in_a_graph(name: str) -> None:
    make = CLIP_METHOD.get_module(name)
    policies = [ClipPolicy(make(1.0) if name == "norm" else make()) for _ in range(2)]
    grad = torch.randn(4096, device="cuda")
    meter = Meter([GradientBlock(grad)])
    for policy in policies:
        policy.decide(reduce_norms(meter.measure()))
    torch.cuda.set_sync_debug_mode("error")
    try:
        policies[0].decide(reduce_norms(meter.measure()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = policies[1].decide(reduce_norms(meter.measure()))
    graph.replay()
    grad.mul_(3)
    graph.replay()
    plain = policies[0].decide(reduce_norms(meter.measure()))
    assert torch.equal(plain.divisor, captured.divisor)
    assert torch.equal(plain.norm, captured.norm)


def test_scaled_step_waits_only_where_it_says_so() -> None:
    params = [torch.nn.Parameter(torch.randn(50, device="cuda")) for _ in range(3)]
    for param in params:
        param.grad = torch.randn_like(param)
    divisor, keep = torch.tensor(2.0, device="cuda"), torch.zeros((), device="cuda")
    for make, waits in ((partial(AdamW, fused=True), False), (partial(SGD, lr=0.1), True)):
        scaled = ScaledStep(make(params))
        scaled.step(divisor, keep)
        assert scaled.waits_for_device == waits
        torch.cuda.set_sync_debug_mode("error")
        try:
            if waits:
                with pytest.raises(RuntimeError, match="synchroniz"):
                    scaled.step(divisor, keep)
                scaled.step(divisor)
            else:
                scaled.step(divisor, keep)
        finally:
            torch.cuda.set_sync_debug_mode("default")
