"""The search for a learning rate, evaluations by step and traces: what they decide, with numbers by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.errors import CheckpointError, ConfigError
from colonnade.trainer.hooks import EvaluateHook, LRFinderHook, LRSchedulerHook, ProfilerHook, metric_hooks
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


def record(loss: float | None, lr: float | None = 0.5) -> Any:
    return SimpleNamespace(loss=loss, lr=lr)


@pytest.mark.parametrize(("step", "rate"), [(0, 1e-3), (5, 1e-2), (10, 1e-1), (12, 1e-1)])
def test_rates_go_from_start_to_end_over_the_steps(step, rate):
    finder = LRFinderHook(1e-3, 1e-1)
    here = trainer(step)
    finder.after_train_iter(here, None, None, None)
    assert [group["lr"] for group in here.engine.optimizer.param_groups] == pytest.approx([rate, rate])
    finder._first = 2
    late = trainer(7, 13)
    late.step_done = False
    finder.after_train_iter(late, None, None, None)
    assert [group["lr"] for group in late.engine.optimizer.param_groups] == [0.0, 1.0]
    late.step_done = True
    finder.after_train_iter(late, None, None, None)
    assert late.engine.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2)


def test_losses_are_smoothed_and_a_growing_one_ends_the_search():
    finder, here = LRFinderHook(1e-3, 1e-1, stop_at=3.0), trainer()
    for each in (record(None), record(1.0, None)):
        finder.on_record(here, each)
    assert (finder.rates, finder.losses) == ([], [])
    for loss in (2.0, 1.0, 5.5):
        finder.on_record(here, record(loss))
    mean = 0.9 * (0.9 * 0.2 + 0.1) + 0.55
    assert finder.rates == [0.5] * 3
    assert finder.losses == pytest.approx([2.0, (0.9 * 0.2 + 0.1) / (1 - 0.9**2), mean / (1 - 0.9**3)])
    best = min(finder.losses)
    assert here.told == ["the loss grows at a learning rate of 0.5"] if 3 * best < 5.5 else here.told == []
    here.told.clear()
    finder.on_record(here, record(best))
    assert here.told == []
    finder.on_record(here, record(math.nan))
    assert here.told == ["the loss grows at a learning rate of 0.5"]


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([5.0, 4.0, 1.0, 0.5, 0.4], 0.1),  # falls by 4 around the second
        ([1.0, 1.0, 1.0, 1.0], None),
        ([1.0, 2.0, 3.0], None),
        ([2.0, 1.0], None),
        ([], None),
        ([9.0, 1.0] + [1.0] * 17 + [0.5, 0.5], 1.8),  # the first tenth does not count
        ([9.0, 9.0, 1.0] + [1.0] * 16, 0.1),  # of 19 it is one
        ([5.0, 5.0, 5.0, 4.0], 0.2),  # the last but one does
        ([9.0, 8.0, 7.0, 7.0, 5.5], 0.1),  # from the one before to the one after
    ],
)
def test_the_suggestion_is_the_rate_of_the_steepest_fall(losses, found):
    finder = LRFinderHook(1e-3, 1e-1)
    finder.losses, finder.rates = losses, [at / 10 for at in range(len(losses))]
    assert finder.suggestion == found


@pytest.mark.parametrize(
    "given", [(0.0, 1.0, 4.0), (-1.0, 1.0, 4.0), (1.0, 1.0, 4.0), (2.0, 1.0, 4.0), (0.1, 1.0, 1.0), (0.1, 1.0, 0.5)]
)
def test_what_is_no_range_of_rates(given):
    start, end, stop_at = given
    with pytest.raises(ConfigError) as error:
        LRFinderHook(start, end, stop_at=stop_at)
    assert str(error.value).startswith(
        f"LRFinderHook: start={start} is above 0 and below end={end}; stop_at={stop_at} is above 1"
    )


@pytest.mark.parametrize(
    ("best", "loss", "is_stopped"),
    [(1.0, 4.0, False), (1.0, 4.5, True), (1.0, 3.5, False), (-1.0, 2.0, False), (-1.0, 2.5, True), (1.0, -9.0, False)],
)
def test_a_search_ends_where_the_loss_is_above_so_many_times_its_best(best, loss, is_stopped):
    finder, here = LRFinderHook(1e-3, 1e-1), trainer()
    finder.losses, finder.rates, finder._mean = [best], [1e-3], 100.0
    finder.on_record(here, record(loss))
    assert bool(here.told) is is_stopped
    assert LRFinderHook(stop_at=1.5).stop_at == 1.5


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


def test_a_search_begins_in_a_folder_of_its_own_and_leaves_it(tmp_path, monkeypatch):
    folder, others = tmp_path / "finder", [False]
    here = trainer(3, 6)
    here.context = SimpleNamespace(get_global_rank=lambda: here.rank)
    here.engine.model, here.state_dict, here.rank = "model", lambda: "state", 0
    here.failed, here.logger, loaded = False, SimpleNamespace(info=lambda text: None), list[Any]()
    here.load_state = loaded.append
    monkeypatch.setattr(metric_hooks, "gather_from_all", lambda mine, context: [mine, *others])
    monkeypatch.setattr(metric_hooks, "CheckpointManager", Managed)
    finder = LRFinderHook(1e-3, 1e-1, folder=folder)

    def refused() -> bool:
        try:
            finder.before_train(here)
        except ConfigError as error:
            return "is not empty" in str(error)
        return False

    assert not refused()  # it is not there
    manager: Any = finder._manager
    assert (manager.given, manager.named) == ((folder, here.context), {})
    assert manager.done == [("save", 3, "model", here.engine.optimizer, "state")]
    assert [group["lr"] for group in here.engine.optimizer.param_groups] == [1e-3, 1e-3]
    folder.mkdir()
    assert not refused()
    others[:] = [True]
    assert refused()
    others[:] = [False]
    (folder / "mine").touch()
    assert refused()
    manager.done.clear()
    finder._manager = manager
    here.failed = True
    finder.after_train(here)
    assert (loaded, manager.done, folder.exists()) == ([], [], True)
    here.failed, here.rank = False, 1
    finder.after_train(here)
    assert (loaded, manager.done, folder.exists()) == ([manager], ["close"], True)
    finder.after_train(here)  # nothing is kept any more
    assert len(loaded) == 1
    for _ in range(2):  # the second time it is gone already
        finder._manager, here.rank = manager, 0
        finder.after_train(here)
        assert not folder.exists()
    finder._manager = manager
    finder.close()
    assert manager.done[-1] == ("exit", CheckpointError)
    finder.close()
    assert len(manager.done) == 4


def test_a_search_sets_the_rate_itself():
    finder, here = LRFinderHook(), trainer()
    here.hooks = [finder, object.__new__(LRSchedulerHook)]
    with pytest.raises(ConfigError, match="leave the LRSchedulerHook out of this fit"):
        finder.after_hook_is_attached(here)
    here.hooks = [finder]
    finder.after_hook_is_attached(here)


@pytest.mark.parametrize("total", [None, 0, 2, 5])
def test_too_few_steps_to_search_in(total):
    with pytest.raises(
        ConfigError, match=r"^LRFinderHook spreads the rates over the steps of the run: fit\(\.\.\., max_steps=100\)"
    ):
        LRFinderHook(1e-3, 1e-1).before_train(trainer(3, total))


@pytest.mark.parametrize(("steps", "skip"), [(0, 0), (-1, 0), (1, -1)])
def test_what_is_no_number_of_traced_steps(steps, skip):
    with pytest.raises(ConfigError, match=f"^ProfilerHook: steps={steps} is from 1 on, skip={skip} from 0 on"):
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
