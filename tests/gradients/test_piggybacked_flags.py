"""Steps in which ranks do not wait to agree: as with NCCL, and here over gloo all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade.engine.stepper import Stepper
from colonnade.errors import GradientError
from colonnade.gradients.uneven import FLAG_COUNT, PiggybackedFlags
from colonnade.testing import run_world
from tests.engine.twins import twins
from tests.gradients.scenarios import numbers
from tests.gradients.summing import on_the_cpu

CPU = torch.device("cpu")


def _world(first: PiggybackedFlags, second: PiggybackedFlags, *says: tuple[bool, bool]) -> list[float]:
    """One step of two ranks: what each says, and whether each drops the step."""
    for flags in (first, second):
        flags.begin()
    summed = first.numbers(*says[0]) + second.numbers(*says[1])
    return [flags.take(summed).item() for flags in (first, second)]


def test_ranks_are_quiet_two_steps_after_they_are_steady_and_never_again_after_one_deviates():
    first, second = PiggybackedFlags(CPU), PiggybackedFlags(CPU)
    steady = []
    for says in [(False, True), (False, False), (False, False), (False, False)]:
        assert _world(first, second, says, (False, False)) == [0.0, 0.0]
        steady.append((first.steady, second.steady))
    assert steady == [(False, False), (False, False), (False, False), (True, True)]
    assert _world(first, second, (False, False), (True, False)) == [1.0, 1.0]
    assert _world(first, second, (False, False), (False, False)) == [0.0, 0.0]
    for _ in range(4):
        _world(first, second, (False, False), (False, False))
        assert (first.steady, second.steady) == (False, False)


def test_ranks_that_all_deviate_at_once_know_it():
    first, second = PiggybackedFlags(CPU), PiggybackedFlags(CPU)
    assert not first.steady
    for step in range(6):
        says = [(step in (3, 4), False), (step == 4, False)]
        told = [flags.begin() for flags in (first, second)]
        assert all((text is not None) == (step == 5) for text in told)  # of step 3, where one deviated
        assert all(text is None or text.startswith("step 3 was skipped, because ") for text in told)
        summed = first.numbers(*says[0]) + second.numbers(*says[1])
        for flags in (first, second):
            assert flags.take(summed).item() == float(step in (3, 4))
        if step == 3:
            assert not first.all_deviate(summed)
            assert first._pending[-1].read()[:2] == [1.0, 0.0]
        if step == 4:
            assert first.all_deviate(summed)
            assert second.all_deviate(summed)
            assert [copy.read()[:2] for copy in first._pending] == [[1.0, 0.0], [0.0, 1.0]]


def test_ranks_at_different_steps_drop_the_step_and_say_so():
    first, second = PiggybackedFlags(CPU), PiggybackedFlags(CPU)
    second.take(torch.zeros(FLAG_COUNT, dtype=torch.float64))
    second._pending.clear()
    assert _world(first, second, (False, False), (False, False)) == [1.0, 1.0]
    _world(first, second, (False, False), (False, False))
    with pytest.raises(GradientError, match="were at different steps"):
        first.begin()


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.branch = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def forward(self, x: Tensor, use: bool) -> Tensor:
        x = torch.tanh(self.trunk(x))
        return self.branch(x) if use else x


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def _uses(rank: int, step: int) -> bool:
    """Steady, then from step 7 on rank 1 leaves the branch out now and then, and both in step 12."""
    return step < 7 or (rank == 0 and step != 12) or (step % 2 == 0 and step != 12)


def _trains(config: dict[str, Any]) -> int:
    Stepper._piggybacked_flags = on_the_cpu  # type: ignore[method-assign]

    def loss(model: Any, rank: int, step: int) -> Tensor:
        return model(numbers(3, 4, seed=10 * step + rank), _uses(rank, step)).square().mean()

    with twins({**config, "sync": {"shared_memory": False}}, Branch, adamw) as both:
        steady = []
        for step in range(16):
            both.train(loss, step)
            steady.append(both.engine._stepper._flags.steady)
            if step != 7:  # nobody saw it coming: dropped on both ranks
                both.follow(loss, step)
        assert steady == [False] * 3 + [True] * 6 + [False] * 7, steady
        return both.engine.skipped_steps


def _trains_with_each(configs: list[dict[str, Any]]) -> list[int]:
    return [_trains(config) for config in configs]


def test_a_step_that_nobody_saw_coming_is_dropped_by_all_and_the_rest_is_right():
    configs = [{"clip_grad_norm": 0.1}, {}, {"zero": 1, "clip_grad_norm": 0.1}, {"zero": 2}]
    assert run_world(2, _trains_with_each, configs).values == [[1] * 4] * 2


def _freezes() -> int:
    """In a steady step all ranks freeze a layer, and thaw it later: nothing is dropped."""
    Stepper._piggybacked_flags = on_the_cpu  # type: ignore[method-assign]

    def loss(model: Any, rank: int, step: int) -> Tensor:
        return model(numbers(3, 4, seed=10 * step + rank), True).square().mean()

    with twins({"clip_grad_norm": 0.1, "sync": {"shared_memory": False}}, Branch, adamw) as both:
        steady = []
        for step in range(20):
            for one in (both.model, both.plain):
                one.branch.requires_grad_(not 6 <= step < 13)
            both.train(loss, step)
            steady.append(both.engine._stepper._flags.steady)
            both.follow(loss, step)
            both.compare()
        assert steady[6], "the step in which it froze was one without agreement"
        assert steady[12]
        assert steady[-1], "and the ranks are steady again"
        return both.engine.skipped_steps


def test_what_all_ranks_change_at_once_drops_no_step():
    assert run_world(2, _freezes).values == [0, 0]
