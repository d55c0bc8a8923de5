"""Evaluations by step and traces: what they decide, with numbers by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.errors import ConfigError
from colonnade.trainer.hooks import EvaluateHook, ProfilerHook
from colonnade.trainer.hooks.checkpoint_hooks import EMAHook


def trainer(step: int = 0, total: int | None = 11) -> Any:
    told: list[str] = []
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0}, {"lr": 1.0}])
    return SimpleNamespace(
        cur_step=step,
        total_steps=total,
        step_done=True,
        told=told,
        request_stop=told.append,
        engine=SimpleNamespace(optimizer=optimizer),
    )


class Managed:
    """Stands for a CheckpointManager: what is done with it."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.given, self.named, self.done = given, named, list[Any]()

    def save(self, *given: Any) -> None:
        self.done.append(("save", *given))

    def close(self) -> None:
        self.done.append("close")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *why: Any) -> None:
        self.done.append(("exit", *why))


@pytest.mark.parametrize(("steps", "skip"), [(0, 0), (-1, 0), (1, -1)])
def test_what_is_no_number_of_traced_steps(steps, skip):
    with pytest.raises(ConfigError, match=f"^ProfilerHook: steps={steps} must be an int >= 1, skip={skip} an int >= 0"):
        ProfilerHook("trace", steps, skip)


@pytest.mark.parametrize(
    ("steps", "skip", "expected"),
    [(1, 0, ["begin 0", "end 1"]), (2, 1, ["begin 1", "end 3"]), (3, 5, ["begin 5", "end 8"]), (3, 9, ["begin 9"])],
)
def test_which_steps_are_traced(monkeypatch, steps, skip, expected):
    told: list[str] = []
    hook = ProfilerHook("trace", steps, skip)

    def begin(here: Any) -> None:
        told.append(f"begin {here.cur_step}")
        hook._profile = "on"

    def end(here: Any) -> None:
        told.append(f"end {here.cur_step}")
        hook._profile = None

    monkeypatch.setattr(hook, "_begin", begin)
    monkeypatch.setattr(hook, "_end", end)
    here = trainer()
    hook.before_train(here)
    for step in range(1, 11):
        here.cur_step, here.step_done = step, False
        hook.after_train_iter(here, None, None, None)  # a pass of several
        here.step_done = True
        hook.after_train_iter(here, None, None, None)
    assert told == expected


def test_an_evaluation_after_every_third_step_leaves_what_was_learnt():
    here = trainer()
    seen: list[Any] = []

    def evaluate(loader: Any, return_output_label: bool) -> None:
        seen.append((here.cur_step, loader, return_output_label))
        here.batch_weight = "that of the evaluation"

    here.evaluate, here.returns_output = evaluate, False
    hook = EvaluateHook("loader", 3)  # type: ignore[arg-type]
    for step in range(1, 8):
        for is_done in (False, True):
            here.cur_step, here.step_done, here.batch_weight = step, is_done, "its own"
            hook.after_train_iter(here, None, None, None)
            assert here.batch_weight == "its own"
    assert seen == [(3, "loader", False), (6, "loader", False)]


@pytest.mark.parametrize("decay", [0.9, 0.0])
def test_what_an_average_begins_with(decay):
    hook = EMAHook(decay, interval=2, warm_up=False, evaluate=False, priority=3)
    assert (hook.decay, hook.interval, hook.warm_up, hook.evaluate, hook.priority) == (decay, 2, False, False, 3)
    assert hook.updates == 0
    for interval in (0, -1):
        with pytest.raises(ConfigError):
            EMAHook(decay, interval)
        with pytest.raises(ConfigError):
            EvaluateHook([], interval)
