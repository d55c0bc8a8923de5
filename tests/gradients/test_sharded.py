"""Gradients on their way to slices: freed while backward runs, late, uneven loaders, dtypes and orders of sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.testing import compare, run_world
from tests.engine.twins import twins
from tests.gradients.scenarios import numbers
from tests.optim.zero.cases import whole_gradients
from tests.ranks import on_ranks

WAYS = [(1, "auto"), (1, False), (2, "auto"), (2, False)]


def _config(stage: int, shared_memory: Any, **more: Any) -> dict[str, Any]:
    sync = {"shared_memory": shared_memory, **more.pop("sync", {})}
    return {"zero": {"stage": stage, "bucket_mb": 0.0003, **more.pop("zero", {})}, "sync": sync, **more}


def layers(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(5, 5) for _ in range(count))).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("passes", [1, 2])
@on_ranks(2)
def test_stage_2_lets_go_of_gradients_while_backward_runs(passes: int):
    """At stage 2 a gradient is gone when its bucket has been summed, at every pass; nothing is left at the end."""
    for shared_memory in ("auto", False):
        config = _config(2, shared_memory, gradient_accumulation=passes)
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            model = layers(8)
            model[7].unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))  # in the bucket that is first
            engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
            alive: list[int] = []

            def count(*_: Any, model: nn.Module = model, alive: list[int] = alive) -> None:
                alive.append(sum(p.grad is not None for p in model.parameters()))

            model[0].register_full_backward_hook(count)
            for _ in range(2):
                engine.zero_grad()
                for micro in range(passes):
                    engine.backward(engine(numbers(3, 5, seed=micro).requires_grad_()).square().mean())
                    engine.step()
            assert len(alive) == 2 * passes
            learnt = alive[passes:]  # at the first step an unused parameter is still waited for
            assert max(learnt) <= 4, f"of 16 gradients, {learnt} were alive when the first layer was reached"
            assert all(p.grad is None for p in model.parameters())
            engine.close()


@on_ranks(2)
def test_a_late_gradient_is_summed_too():
    """A gradient that is added to a parameter after its bucket was sent, on one rank only."""
    for stage, shared_memory in WAYS:
        with launch(_config(stage, shared_memory), context=ParallelContext(), verbose=False) as gpc:
            model, plain = layers(), layers()
            engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
            rank = gpc.get_global_rank()

            def add_late(*_: Any, model: nn.Module = model, rank: int = rank) -> None:
                if rank == 1:
                    weight = model[3].weight
                    extra = torch.ones_like(weight)
                    weight.grad = extra if weight.grad is None else weight.grad + extra

            model[0].register_full_backward_hook(add_late)
            for step in range(2):
                engine.zero_grad()
                engine.backward(engine(numbers(3, 5, seed=10 * step + rank).requires_grad_()).square().mean())
                engine._sum_gradients()
                losses = [plain(numbers(3, 5, seed=10 * step + part)).square().mean() for part in range(2)]
                (sum(losses) / 2 + plain[3].weight.sum() / 2).backward()
                truth = {name: p.grad for name, p in plain.named_parameters()}
                compare(truth, whole_gradients(engine, gpc), 1e-12)
                plain.zero_grad()
                engine._end_step()
            engine.close()


@on_ranks(2)
def test_uneven_loaders_and_weighted_losses():
    """Rank 1 has one batch less, rank 0's last step is its own; (sum, count) losses."""

    def loss(model: Any, rank: int, at: int) -> tuple[Tensor, int]:
        x = numbers(2 + at, 5, seed=at + 10 * rank)
        return model(x).square().sum(), x.numel()

    for stage, shared_memory in [*WAYS, (0, "auto")]:
        config = _config(stage, shared_memory)
        with twins(config, layers, lambda model: torch.optim.AdamW(model.parameters(), lr=0.1)) as both:
            for at in both.engine.batches(range(3 - both.rank)):
                both.train(loss, at)
            for at in range(3):
                both.follow(loss, places=[(rank, at) for rank in range(2) if at < 3 - rank])


@on_ranks(2, timeout=30)
def test_uneven_loaders_beside_accumulation():
    """Rank 1 runs out in the middle of a step: rank 0 waits for its part of a pass, and it for rank 0's next batch."""

    def loss(model: Any, rank: int, at: int) -> Tensor:
        return model(numbers(3, 5, seed=at + 10 * rank)).square().mean()

    for stage, shared_memory in WAYS:
        with twins(_config(stage, shared_memory, gradient_accumulation=2), layers, sgd) as both:
            for at in both.engine.batches(range(6 - 3 * both.rank)):
                both.train(loss, at)
            for at in (0, 2, 4):
                both.follow(loss, places=[(r, one) for r in range(2) for one in (at, at + 1) if one < 6 - 3 * r])


@on_ranks(2, timeout=30)
def test_ranks_that_use_other_layers_may_talk_between_backward_and_step():
    """Rank 1 does not use the last layers, whose buckets rank 0 waits for in backward; then both join their losses."""

    def loss_of(model: Any, rank: int, step: int) -> Tensor:
        return model[: 8 - 3 * rank](numbers(3, 5, seed=step + 10 * rank)).square().mean()

    for stage, shared_memory in [*WAYS, (0, False)]:
        config = _config(stage, shared_memory, sync={"bucket_mb": 0.0003})
        with twins(config, lambda: layers(8), sgd) as both:
            for step in range(3):
                both.engine.zero_grad()
                loss = loss_of(both.model, both.rank, step)
                both.engine.backward(loss)
                dist.all_reduce(loss.detach())
                both.engine.step()
                both.follow(loss_of, step)


def _dtypes() -> dict[str, list[float]]:
    """How far sums of 1 + 2 tiny ones are from the truth, by how they are taken, in bf16."""
    found = {}
    ways: list[tuple[str, Any, dict[str, Any]]] = [
        ("shared", "auto", {}),
        ("scatter", False, {}),
        ("fp32", False, {"reduce_dtype": "fp32"}),
        ("ordered", False, {"fixed_order": True}),
    ]
    for name, shared_memory, sync in ways:
        with launch(_config(2, shared_memory, sync=sync), context=ParallelContext(), verbose=False) as gpc:
            model = nn.Linear(64, 1, bias=False).bfloat16()
            engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.0), context=gpc)[0]
            value = 1.0 if gpc.get_global_rank() == 0 else 2**-9
            engine.zero_grad()
            engine.backward(engine(torch.full((1, 64), value, dtype=torch.bfloat16)).sum())
            engine._sum_gradients()
            gradient = engine.optimizer.whole_gradient(model.weight)
            found[name] = [gradient.dtype == torch.float32, gradient.float().mean().item() * gpc.world_size]
            engine.close()
    return found


def test_sums_of_half_precision_gradients_with_masters_are_taken_in_fp32():
    exact = 1 + 2 * 2**-9
    for found in run_world(3, _dtypes).values:
        assert found["shared"] == [True, pytest.approx(exact, abs=1e-6)]
        assert found["fp32"] == [True, pytest.approx(exact, abs=1e-6)]
        assert found["ordered"] == [True, pytest.approx(exact, abs=1e-6)]
        assert found["scatter"] == [True, pytest.approx(exact, abs=2**-7)]


def _compressed() -> Tensor:
    with launch(_config(1, False, sync={"compress": "bf16"}), context=ParallelContext(), verbose=False) as gpc:
        model = nn.Linear(8, 1, bias=False)
        engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.0), context=gpc)[0]
        engine.backward(engine(torch.full((1, 8), 1.001)).sum())
        engine._sum_gradients()
        gradient = engine.optimizer.whole_gradient(model.weight)
        engine.close()
        return gradient


def test_gradients_may_travel_in_half_precision():
    gradient = run_world(2, _compressed).values[0]
    assert torch.equal(gradient, torch.ones(1, 8)), "1.001 is 1 in bf16"


@on_ranks(2)
def test_whole_gradients_come_back_where_they_are_wanted():
    """Stage 1 with reduce_scatter=False: every rank has the whole gradient, as at stage 0."""
    for shared_memory in ("auto", False):
        config = _config(1, shared_memory, zero={"reduce_scatter": False})
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            model, plain = layers(), layers()
            engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
            for step in range(2):
                engine.zero_grad()
                engine.backward(engine(numbers(3, 5, seed=10 * step + gpc.get_global_rank())).square().mean())
                engine._sum_gradients()
                plain.zero_grad()
                (sum(plain(numbers(3, 5, seed=10 * step + part)).square().mean() for part in range(2)) / 2).backward()
                for parameter, true in zip(model.parameters(), plain.parameters(), strict=True):
                    assert torch.allclose(parameter.grad, true.grad, rtol=1e-12)
                engine._end_step()
            engine.close()


@on_ranks(2)
def test_stage_2_keeps_the_sums_of_all_passes_in_a_single_bucket():
    passes = 3
    """With a single bucket the next pass finds the sum of the one before still under way."""
    for shared_memory in ("auto", False):
        config = {"zero": 2, "sync": {"shared_memory": shared_memory}, "gradient_accumulation": passes}
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            model, plain = layers(), layers()
            engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
            for micro in range(passes):
                engine.backward(engine(numbers(3, 5, seed=10 * micro + gpc.get_global_rank())).square().mean())
                if micro + 1 < passes:
                    engine.step()
                losses = [plain(numbers(3, 5, seed=10 * micro + part)).square().mean() for part in range(2)]
                (sum(losses) / (2 * passes)).backward()
            engine._sum_gradients()
            compare({name: p.grad for name, p in plain.named_parameters()}, whole_gradients(engine, gpc), 1e-12)
            engine.close()
