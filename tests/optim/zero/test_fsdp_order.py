"""Ranks that do not run the same modules under stage 3: an error on every rank, and no weight is changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.errors import GradientError
from colonnade.optim.zero.fsdp import linked
from colonnade.testing import compare, gather_weights, run_world
from tests.gradients.scenarios import MINE, numbers
from tests.optim.zero.cases import Moe
from tests.ranks import on_ranks


class Chooser(nn.Module):
    """Layers in the order that `order` says; `own` decides between two weights of one layer."""

    def __init__(self, widths: tuple[int, ...] = (6, 6, 6), gain: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Pair(width) for width in widths)
        self.head = nn.Linear(6, 3)
        self.gain = nn.Parameter(torch.tensor(1.5)) if gain else 1.0
        self.double()
        self.order: list[int] = list(range(len(widths)))
        self.own = 0

    def forward(self, x: Tensor) -> Tensor:
        for at in self.order:
            x = self.layers[at](x, self.own)
        return self.head(x) * self.gain


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.ModuleList(nn.Linear(6, width) for _ in range(2))
        self.outside = nn.Linear(width, 6)

    def forward(self, x: Tensor, own: int) -> Tensor:
        return x + self.outside(torch.tanh(self.inside[own](x)))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


assert MINE  # the mode of the axis "mine"
WRAP = {"stage": 3, "wrap": "Pair"}


@contextmanager
def engine_of(
    model: nn.Module, zero: Any = WRAP, accumulation: int = 1, clip: float | None = 0.5
) -> Iterator[tuple[Any, ParallelContext]]:
    config: dict[str, Any] = {"zero": zero, "gradient_accumulation": accumulation}
    if clip is not None:
        config["clip_grad_norm"] = clip
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        engine = initialize(model, sgd, context=gpc)[0]
        yield engine, gpc
        engine.close()


def one_pass(engine: Any, seed: int, rank: int) -> None:
    engine.backward(engine(numbers(3, 6, seed=10 * seed + rank)).square().mean())
    engine.step()


def passes(engine: Any, seed: int, rank: int, count: int) -> None:
    for micro in range(count):
        one_pass(engine, seed + micro, rank)


def copy_weights(engine: Any) -> list[Tensor]:
    return [p.to_local().clone() if hasattr(p, "to_local") else p.detach().clone() for p in engine.model.parameters()]


Change = Callable[[Any, int], None]


def skip_one(model: Any, rank: int) -> None:
    model.order = [0, 1 + rank]


def swap(model: Any, rank: int) -> None:
    model.order = [0, 1, 2] if rank else [0, 2, 1]


def fewer(model: Any, rank: int) -> None:
    model.order = [0, 1, 2] if rank else [0]


def more(model: Any, rank: int) -> None:
    model.order = [0, 1, 2, 1] if rank else [0, 1, 2]


def other_weight(model: Any, rank: int) -> None:
    model.own = rank


CASES: list[tuple[tuple[int, ...], Change, str]] = [
    ((6, 6, 6), skip_one, r"rank 0 gathers layers\.1; rank 1 gathers layers\.2"),
    ((6, 6, 6), swap, r"rank 0 gathers layers\.2; rank 1 gathers layers\.1"),
    ((6, 8, 4), skip_one, r"rank 0 gathers layers\.1; rank 1 gathers layers\.2"),
    ((6, 6, 6), fewer, r"rank 0 .*; rank 1 gathers layers\.1"),
    ((6, 6, 6), more, r"rank 0 .*; rank 1 gathers layers\.1"),
    ((6, 6, 6), other_weight, r"rank 0 reduces layers\.2, of these .*inside\.0\.weight.*; rank 1 .*inside\.1\.weight"),
]


def _free_gathered(model: Any) -> None:
    """Free the parameters that a failed pass left gathered. Before torch 2.12, FSDP2 has no method for all of them."""
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
    else:
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()


def _parting(when: int, gain: bool, clip: float | None, accumulation: int) -> float:
    """Each case parts at step `when`; everybody gets the error before a weight has changed."""
    slowest = 0.0
    for widths, change, message in CASES:
        with engine_of(Chooser(widths, gain), accumulation=accumulation, clip=clip) as (engine, gpc):
            rank = gpc.get_global_rank()
            for step in range(when):
                engine.zero_grad()
                passes(engine, 5 * step, rank, accumulation)
            before, started = copy_weights(engine), time.monotonic()
            change(engine.model, rank)
            engine.zero_grad()
            with pytest.raises(GradientError, match=message) as error:
                passes(engine, 90, rank, accumulation)
            slowest = max(slowest, time.monotonic() - started)
            assert f"step {when + 1}:" in str(error.value)
            assert "by zero" in str(error.value)
            assert "zero stage 2" in str(error.value)
            _free_gathered(engine.model)
            assert all(torch.equal(a, b) for a, b in zip(before, copy_weights(engine), strict=True)), change
    return slowest


@pytest.mark.parametrize("when", [0, 1, 3])
def test_ranks_that_part_are_told_in_seconds(when):
    """At the first step, when the plan is new, and when it is old; here torch's own checks of shapes are off."""
    env = {"TORCH_DISTRIBUTED_DEBUG": "OFF"}
    assert max(run_world(2, _parting, when, when == 3, 0.5 if when else None, 1 + when % 2, env=env).values) < 20


@on_ranks(2)
def test_a_rank_that_runs_a_pass_of_its_own():
    """A rank that evaluates once more than the others, or runs a pass of its own outside the engine."""
    for extra in (torch.no_grad, torch.enable_grad):
        with engine_of(Chooser(), accumulation=2) as (engine, gpc):
            rank = gpc.get_global_rank()
            _steps(engine, rank, 3)
            with pytest.raises(GradientError, match="do not run the same modules"):
                _steps(engine, rank, 4, extra if rank == 0 else None)


def _steps(engine: Any, rank: int, count: int, extra: Any = None) -> None:
    if extra is not None:
        with extra():
            engine(numbers(3, 6, seed=1))
    for step in range(count):
        engine.zero_grad()
        passes(engine, 5 * step, rank, 2)


class Sparse(nn.Module):
    """Blocks, each with experts of their own spread."""

    def __init__(self, gpc: ParallelContext) -> None:
        super().__init__()
        self.moes = nn.ModuleList(Moe(gpc) for _ in range(2))
        self.back = nn.Linear(3, 6).double()
        self.order = [0, 1]

    def forward(self, x: Tensor) -> Tensor:
        for at in self.order:
            x = self.back(self.moes[at](x))
        return x


@pytest.mark.slow
@on_ranks(4, env={"TORCH_DISTRIBUTED_DEBUG": "OFF"})
def test_one_of_four_ranks_parts():
    """Shards that are replicas on another axis, and experts beside dense layers; one rank of four parts."""
    mine = {"parallel": {"mine": {"size": 2, "mode": "scenario_mine"}}, "zero": {**WRAP, "replicate": "mine"}}
    # Experts have collectives of their own: with those only the first step can be told before somebody waits.
    for config, when in ((mine, 3), (mine, 0), ({"parallel": {"expert": 2}, "zero": 3}, 0)):
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            model: Any = Chooser() if config is mine else Sparse(gpc)
            engine, rank = initialize(model, sgd, context=gpc)[0], gpc.get_global_rank()
            for step in range(when):
                engine.zero_grad()
                one_pass(engine, step, rank)
            if rank == 3:
                model.order = [1, 0]
            before = copy_weights(engine)
            engine.zero_grad()
            message = rf"step {when + 1}.*ranks 0, 1, 2 gathers \S*\.0\S*; rank 3 gathers \S*\.1"
            with pytest.raises(GradientError, match=message):
                one_pass(engine, 9, rank)
            _free_gathered(model)
            assert all(torch.equal(a, b) for a, b in zip(before, copy_weights(engine), strict=True))


def test_linked_ranks():
    sets = [[0, 1], [2, 3], [4, 5], [0, 2], [1, 3]]
    assert linked(0, sets) == linked(3, sets) == (0, 1, 2, 3)
    assert linked(4, sets) == (4, 5)
    assert linked(6, sets) == (6,)


@on_ranks(2)
def test_changes_that_all_ranks_make_are_fine():
    """What all ranks do alike may change at any time: evaluations, other modules, other orders, dropped steps."""
    orders = [[0, 1, 2], [0, 1, 2], [0, 1, 2], [2, 0], [2, 0], [2, 0], [2, 0], [1, 1, 0], [0, 1, 2], [0, 1, 2]]
    with engine_of(Chooser(gain=True)) as (engine, gpc):
        plain, rank = Chooser(gain=True), gpc.get_global_rank()
        reference = sgd(plain.parameters())
        for step, order in enumerate(orders):
            engine.model.order = plain.order = order
            for _ in range(step % 4):
                with torch.no_grad():
                    x = numbers(3, 6, seed=step)
                    torch.testing.assert_close(engine(x), plain(x), rtol=1e-10, atol=1e-12)
            engine.zero_grad()
            if step == 2:  # not finite: dropped by all
                engine.backward(engine(numbers(3, 6, seed=step) * float("nan")).square().mean())
                engine.step()
                assert engine.last_step_skipped
                continue
            one_pass(engine, step, rank)
            reference.zero_grad()
            plain(torch.cat([numbers(3, 6, seed=10 * step + part) for part in range(2)])).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item()
            assert engine.grad_norm.item() == pytest.approx(norm, rel=1e-10)
            reference.step()
        compare(dict(plain.named_parameters()), gather_weights(engine.model, gpc), 1e-10)


@on_ranks(2)
def test_a_steady_step_compares_once():
    """How many comparisons each step makes once the order is known."""
    from colonnade.optim.zero.fsdp_checks import RunOrder

    sent: list[int] = []
    send = RunOrder._send

    def counted(self: RunOrder, at: int, code: int) -> Any:
        sent[-1] += 1
        return send(self, at, code)

    RunOrder._send = counted  # type: ignore[method-assign]
    with engine_of(Chooser()) as (engine, gpc):
        for step in range(5):
            sent.append(0)
            engine.zero_grad()
            one_pass(engine, step, gpc.get_global_rank())
    assert sent[0] > 8
    assert sent[1:] == [1, 1, 1, 1]
