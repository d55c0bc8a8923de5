"""Stage 3 is FSDP2 under our engine: hybrid sharding, what is gathered together, prefetch, refusals, given models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.errors import ColonnadeError
from colonnade.optim.zero.formula import shard_dim
from colonnade.testing import compare, gather_weights, run_world
from tests.gradients.scenarios import MINE, SplitMoe, numbers
from tests.optim.zero.cases import run_all
from tests.ranks import on_ranks


class Net(nn.Module):
    """Layers in a list, and a scalar, which FSDP2 does not take."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count))
        self.head = nn.Linear(6, 3)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.gain


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def check(
    engine: Any, gpc: ParallelContext, part: int, parts: int, steps: int = 4, plain: nn.Module | None = None
) -> None:
    """Train and compare with one process, clipped."""
    plain = plain or Net()
    reference = adamw(plain.parameters())
    for step in range(steps):
        engine.zero_grad()
        engine.backward(engine(numbers(3, 6, seed=10 * step + part)).square().mean())
        engine.step()
        reference.zero_grad()
        x = torch.cat([numbers(3, 6, seed=10 * step + other) for other in range(parts)])
        plain(x).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()
        reference.step()
        assert engine.grad_norm.item() == pytest.approx(norm, rel=1e-10)
    compare(dict(plain.named_parameters()), gather_weights(engine.model, gpc), 1e-10)


def units_of(model: nn.Module) -> list[str]:
    from torch.distributed.fsdp import FSDPModule

    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


CHOICES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["", "layers.0", "layers.1", "layers.2", "layers.3"]),
    ({"wrap": ["layers.*.0", "head"]}, ["", "layers.0.0", "layers.1.0", "layers.2.0", "layers.3.0", "head"]),
    ({"wrap": "Sequential", "prefetch": 2}, ["", "layers.0", "layers.1", "layers.2", "layers.3"]),
    ({"reshard": False, "prefetch": 1, "offload": True}, ["", "layers.0", "layers.1", "layers.2", "layers.3"]),
]


def _choices() -> None:
    """What is gathered together and ahead."""
    for zero, expected in CHOICES:
        config = {"zero": {"stage": 3, **zero}, "clip_grad_norm": 0.1}
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            engine = initialize(Net(), adamw, context=gpc)[0]
            assert units_of(engine.model) == expected
            ahead = zero.get("prefetch", 0)
            states = [engine.model.get_submodule(name)._get_fsdp_state() for name in expected]  # type: ignore[operator]
            for at, state in enumerate(states if ahead else []):
                assert state._states_to_forward_prefetch == states[at + 1 :][:ahead]
                assert state._states_to_backward_prefetch == states[:at][::-1][:ahead]
            check(engine, gpc, gpc.get_global_rank(), 2)
            assert {row.parameter for row in engine.ledger().rows} == {"gain"}
            engine.close()


def _weighted() -> None:
    """(sum, count) losses are divided once by the count of the world, also where nobody of ours sums gradients."""
    for parallel, make in (({}, adamw), ({"tensor": 2}, lambda p: torch.optim.Adagrad(p, lr=0.05))):
        config = {"parallel": parallel, "zero": 3, "gradient_accumulation": 2, "clip_grad_norm": 0.1}
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            engine, plain = initialize(Net(), make, context=gpc)[0], Net()
            reference = make(plain.parameters())
            data = gpc.data_parallel_size
            for step in range(3):
                engine.zero_grad()
                for micro in range(2):
                    x = numbers(2 + micro, 6, seed=10 * step + 5 * micro + gpc.get_local_rank(ParallelMode.DATA))
                    engine.backward((engine(x).square().sum(), 3 * len(x)))
                    engine.step()
                parts = [numbers(2 + m, 6, seed=10 * step + 5 * m + part) for m in range(2) for part in range(data)]
                reference.zero_grad()
                plain(torch.cat(parts)).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
                reference.step()
            compare(dict(plain.named_parameters()), gather_weights(engine.model, gpc), 1e-7)
            engine.close()


def _hybrid() -> None:
    config = {
        "parallel": {"mine": {"size": 2, "mode": "scenario_mine"}},
        "zero": {"stage": 3, "replicate": "mine"},
        "clip_grad_norm": 0.1,
    }
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        model = Net()
        engine = initialize(model, adamw(model.parameters()), context=gpc)[0]  # built before: carried over
        weight: Any = model.head.weight
        assert [str(spec) for spec in weight.placements] == ["R", f"S({shard_dim(weight.shape, 2)})"]
        rank = gpc.get_global_rank()
        assert gpc.get_ranks_in_group(ParallelMode.DATA) == [rank - rank % 2, rank - rank % 2 + 1]  # on one host of two
        assert gpc.get_ranks_in_group(MINE) == [rank % 2, rank % 2 + 2]
        check(engine, gpc, rank, 4)
        engine.close()


def test_hybrid_shards_lie_inside_a_host_and_are_replicas_on_others():
    told = run_world(4, _hybrid, env={"LOCAL_WORLD_SIZE": "2"}).stderr[0]
    assert "zero.replicate" not in told


def test_shards_that_need_not_lie_on_two_hosts_are_told():
    world = run_world(4, _wide, env={"LOCAL_WORLD_SIZE": "2"})
    assert "The 4 ranks that share shards" in world.stderr[0]
    assert "Use data=2 and mine of size 2 to place them on one host" in world.stderr[0]
    assert "zero.replicate" not in world.stderr[1]


def _wide() -> None:
    config = {"parallel": {"mine": {"size": 1, "mode": "scenario_mine"}}, "zero": {"stage": 3, "replicate": "mine"}}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        initialize(Net(), adamw, context=gpc)[0].close()


def _given() -> None:
    """A model that is FSDP2's already, and one with a tensor plan of DTensors, are taken as they are."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for stage in (0, 1, 3):
        config = {"zero": stage, "clip_grad_norm": 0.1}
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            model = Net()
            held = {model.gain}
            fully_shard(model, mesh=gpc.device_mesh(ParallelMode.DATA), ignored_params=held)
            engine = initialize(model, adamw, context=gpc)[0]
            check(engine, gpc, gpc.get_global_rank(), 2)
            engine.close()
    for stage in (1, 2):
        config = {"parallel": {"tensor": 2}, "zero": stage, "clip_grad_norm": 0.1}
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            model = pair()
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(model, gpc.device_mesh(ParallelMode.TENSOR), plan)
            engine = initialize(model, adamw, context=gpc)[0]
            check(engine, gpc, 0, 1, plain=pair())
            engine.close()


def pair() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@on_ranks(4)
def test_refusals_say_what_to_do():
    gpc = ParallelContext()
    mixed = pytest.raises(ColonnadeError, match=r"experts over EXPERT_DATA / 4.*separate module")
    with launch({"parallel": {"expert": 2}, "zero": 3}, context=gpc, verbose=False), mixed:
        initialize(SplitMoe(gpc), adamw, context=gpc)
    for zero, message in [
        ({"stage": 3, "wrap": "laiers.*"}, "matches no module name"),
        ({"stage": 3, "replicate": "mine"}, "must be an axis other than data"),
    ]:
        context = ParallelContext()
        with launch({"zero": zero}, context=context, verbose=False), pytest.raises(ColonnadeError, match=message):
            initialize(Net(), adamw, context=context)


def _uneven() -> str:
    with launch({"zero": 3}, context=ParallelContext(), verbose=False) as gpc:
        engine = initialize(Net(), adamw, context=gpc)[0]
        with pytest.raises(ColonnadeError) as error:
            next(engine.batches([torch.ones(1, 4)] * (1 + gpc.get_global_rank())))
        engine.close()
        return str(error.value)


def test_a_rank_may_not_run_out_of_batches_under_stage_3():
    assert all("the same number of batches" in said for said in run_world(2, _uneven).values)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _inference_first() -> None:
    """FSDP2 makes the memory that it gathers into in the first pass; made in inference mode, no other could use it."""
    with launch({"zero": 3}, context=ParallelContext(), verbose=False) as gpc:
        model, plain = Deep(), Deep()
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), context=gpc)[0]
        truth = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(3):
            x = numbers(4, 6, seed=step)
            with torch.inference_mode():
                assert torch.allclose(engine(x), plain(x), rtol=1e-10)
            for one, optimizer in ((engine, engine), (plain, truth)):
                optimizer.zero_grad()
                loss = one(x).square().mean()
                engine.backward(loss) if one is engine else loss.backward()
                optimizer.step()
        compare(dict(plain.named_parameters()), gather_weights(model, gpc), 1e-10)
        engine.close()


def _twice() -> None:
    """A graph that goes through the weights twice is explained."""
    with launch({"zero": 3}, context=ParallelContext(), verbose=False) as gpc:
        engine = initialize(Deep(), lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
        x = numbers(4, 6, seed=0).requires_grad_()
        (slope,) = torch.autograd.grad(engine(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError) as caught:
            engine.backward(slope.square().mean())
        assert "create_graph=True" in caught.value.__notes__[0]
        assert "zero stage 2" in caught.value.__notes__[0]


def test_stage_3_on_two_ranks():
    """What is gathered together, weighted losses, given models, inference first, graphs that go through the weights twice."""
    run_world(2, run_all, [_choices, _weighted, _given, _inference_first, _twice], timeout=110)
