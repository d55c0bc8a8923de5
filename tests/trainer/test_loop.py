"""A run from its first hook to its last, in one process; and what the ranks add up between two steps."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.errors import ConfigError, HookError, TrainerError
from colonnade.trainer import BaseHook, Trainer, trainer
from colonnade.trainer.data import EpochPosition
from colonnade.trainer.hooks import LoadCheckpointHook, LossHook, SaveCheckpointHook
from colonnade.trainer.hooks.hook import POINTS, HookList
from tests.ranks import on_ranks
from tests.trainer.runs import cut, make_trainer


class Events(BaseHook):
    """Writes down every point, and does `at[point, epoch, step]` there."""

    def __init__(self, at: dict[tuple[str, int, int], Any] | None = None, points: str = " ".join(POINTS)) -> None:
        super().__init__(priority=1000)
        self.seen: list[str] = []
        for point in points.split():
            setattr(self, point, self._note(point, at or {}))

    def _note(self, point: str, at: dict[tuple[str, int, int], Any]) -> Any:
        def note(trainer: Trainer, *given: Any) -> None:
            self.seen.append(point)
            act = at.get((point, trainer.cur_epoch, trainer.cur_step))
            if act is not None:
                act(trainer)

        return note


def fitted(batches: int = 2, config: dict[str, Any] | None = None, **options: Any) -> Trainer:
    """A run of one process, whose context has been given back."""
    made = make_trainer(config or {}, lr=0.1)
    try:
        made.fit(cut(range(4 * batches), 4 * batches), **options)
    finally:
        made.context.destroy()
    return made


TEST = "before_test before_test_epoch before_test_iter after_test_iter after_test_epoch after_test"


def test_the_points_of_a_run_come_in_their_order():
    events = Events()
    made = fitted(epochs=2, test_dataloader=cut(range(4), 4), test_interval=2, hooks=[events])
    step = "before_train_iter after_train_iter"
    epoch = f"before_train_epoch {step} {step} on_record on_record after_train_epoch"
    expected = f"after_hook_is_attached before_train {epoch} {epoch} {TEST} after_train"
    # The record of a first step comes with the sums of a later one; the others when the epoch ends.
    assert [each for each in events.seen if each != "on_record"] == [
        each for each in expected.split() if each != "on_record"
    ]
    assert events.seen.count("on_record") == 4
    assert events.seen[-1] == "after_train"
    assert (
        events.seen.index("after_train_epoch") > [at for at, each in enumerate(events.seen) if each == "on_record"][1]
    )
    assert (made.cur_epoch, made.cur_step, made.is_fitting) == (2, 4, False)


def test_a_step_has_several_batches_with_accumulation_and_the_last_may_have_fewer():
    done: list[bool] = []
    note = Events(
        {("after_train_iter", 0, step): lambda here: done.append(here.step_done) for step in range(4)},
        "after_train_iter",
    )
    made = fitted(5, {"gradient_accumulation": 2}, epochs=1, hooks=[note])
    # The engine itself makes the half that the last step lacks.
    assert done == [False, True] * 3
    assert (made.cur_step, made.steps_per_epoch) == (3, 3)
    assert made._place == EpochPosition(0, 0)  # of the next epoch


def stop(trainer: Trainer) -> None:
    trainer.request_stop("enough")


@pytest.mark.parametrize(
    ("limits", "interval", "at", "epochs", "steps", "tests"),
    [
        ({"epochs": 3}, 1, None, 3, 6, 3),
        ({"epochs": 5}, 2, None, 5, 10, 2),
        ({"epochs": 5}, 6, None, 5, 10, 0),
        ({"max_steps": 3}, 1, None, 1, 3, 2),
        ({"max_steps": 4}, 1, None, 1, 4, 2),
        ({"epochs": 5, "max_steps": 20}, 1, None, 5, 10, 5),
        ({"epochs": 5}, 1, ("after_train_iter", 1, 3), 1, 4, 1),
        ({"epochs": 5}, 1, ("before_train_iter", 1, 2), 1, 4, 1),
        ({"epochs": 5}, 1, ("after_train_epoch", 1, 4), 2, 4, 2),
        ({"epochs": 5}, 1, ("after_test", 1, 4), 2, 4, 2),
    ],
)
def test_a_run_ends_after_its_epochs_its_steps_or_the_step_after_a_wish(limits, interval, at, epochs, steps, tests):
    events = Events({at: stop} if at else {})
    made = fitted(test_dataloader=cut(range(4), 4), test_interval=interval, hooks=[events], **limits)
    assert (made.cur_epoch, made.cur_step, events.seen.count("before_test")) == (epochs, steps, tests)
    assert (made.stopping, made.stop_reason) == ((True, "enough") if at else (False, ""))
    assert at or made.total_steps == steps


@pytest.mark.parametrize(
    ("at", "tests"), [(("after_train_iter", 0, 1), 0), (("after_train_epoch", 0, 2), 0), (("after_test", 0, 2), 1)]
)
def test_a_wish_to_leave_waits_for_no_evaluation_and_ends_the_process_with_75(at, tests):
    events = Events({at: lambda here: here.request_stop("a signal", leave=True)})
    with pytest.raises(SystemExit) as left:
        fitted(epochs=3, test_dataloader=cut(range(4), 4), hooks=[events])
    assert (left.value.code, events.seen.count("before_test")) == (75, tests)
    assert events.seen[-1] == "after_train"


@pytest.mark.parametrize("point", ["before_train", "before_train_epoch", "after_train_iter", "on_record", "after_test"])
def test_the_error_of_a_hook_ends_the_run_in_order_and_keeps_its_cause(point):
    def fail(trainer: Trainer) -> None:
        raise ZeroDivisionError("inside")

    ends: list[bool] = []
    failing = Events({(point, 0, step): fail for step in range(3)}, point)
    other = Events({("after_train", 0, step): lambda here: ends.append(here.failed) for step in range(3)})
    with pytest.raises(HookError, match=f"hook Events failed in {point}") as error:
        fitted(epochs=1, test_dataloader=cut(range(4), 4), hooks=[failing, other])
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert (other.seen[-1], ends) == ("after_train", [True])


@pytest.mark.parametrize("name", ["epochs", "max_steps", "test_interval"])
def test_limits_are_whole_numbers_from_1_on(name):
    made: Any = object.__new__(Trainer)
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ConfigError) as error:
            made.fit([], **{"epochs": 1, name: wrong})
        assert str(error.value).startswith(f"{name} is {wrong!r}; it must be an int >= 1")
    with pytest.raises(ConfigError, match=r"^fit needs an end\. Pass epochs= or max_steps="):
        made.fit([])


def test_an_epoch_without_batches_and_a_loader_that_fails_are_errors():
    def nothing() -> Any:
        yield from ()

    def broken() -> Any:
        yield cut(range(4), 4)[0]
        raise OSError("gone")

    made = make_trainer({})
    with pytest.raises(ConfigError, match="epoch 0 has no batches on any rank"):
        made.fit(nothing(), epochs=1)
    made.cur_epoch = 0
    with pytest.raises(TrainerError, match="loader failed in epoch 0, after step 1: OSError: gone") as error:
        made.fit(broken(), epochs=1)
    assert isinstance(error.value.__cause__, OSError)
    made.context.destroy()


def test_a_run_that_was_saved_at_the_end_of_an_epoch_goes_on_with_its_evaluation(tmp_path):
    batches = cut(range(8), 8)
    fitted(epochs=1, hooks=[SaveCheckpointHook(1, tmp_path)])
    events = Events()
    made = make_trainer({}, lr=0.1)
    made.fit(batches, epochs=2, test_dataloader=batches, hooks=[LoadCheckpointHook(tmp_path), events])
    made.context.destroy()
    parts = [each for each in events.seen if each in ("before_train_epoch", "before_test")]
    assert parts == ["before_test", "before_train_epoch", "before_test"]


def test_hooks_of_a_run_stay_when_a_hook_evaluates_with_others():
    """They are closed then, and yet called: as it was."""
    batches = cut(range(4), 4)
    events = Events({("after_train_iter", 0, 1): lambda here: here.evaluate(batches, hooks=[LossHook()])})
    fitted(epochs=1, hooks=[events])
    assert events.seen.count("after_train_iter") == 2
    assert events.seen[-1] == "after_train"


def between(**given: Any) -> tuple[Any, Any]:
    """A trainer and its run, whose sums are what `given` says."""
    fit: Any = SimpleNamespace(ahead=False, hooks=HookList(None, []), sums=SimpleNamespace(finish=lambda: fit.told))
    made: Any = object.__new__(Trainer)
    made._hooks, made._fit, made.context = fit.hooks, fit, SimpleNamespace(is_launched=False)
    made.cur_epoch, made._cur_step, made.stopping, made.stop_reason = 3, 7, False, ""
    made.step_done, made._wants_stop, made._wants_exit = True, "", False
    vars(made).update(given)
    return made, fit


class Stateful(list[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Looks(BaseHook):
    """Keeps how the run treats its batches in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[bool, bool]] = []

    def before_train_iter(self, here: Trainer) -> None:
        assert here._fit is not None
        self.found.append((here._fit.equal, here._fit.ahead))


@pytest.mark.parametrize(
    ("device_asks", "accumulation", "expected"),
    [
        (True, 1, [[(True, True)], [(True, False)], [(True, True)], [(False, False)]]),
        (False, 1, [[(True, False)], [(True, False)], [(True, False)], [(False, False)]]),
        (True, 2, [[(True, True)], [(True, False)], [(False, False)], [(False, False)]]),  # three batches: half a step
    ],
)
@on_ranks(2)
def test_batches_are_equal_and_read_ahead_where_all_ranks_have_whole_steps_left(
    device_asks: bool, accumulation: int, expected
):
    found = []
    if device_asks:
        trainer.ASKS_AHEAD.add("cpu")
    made = make_trainer({"gradient_accumulation": accumulation})
    rank = made.context.get_global_rank()
    for loader in (cut(range(8), 8), Stateful(cut(range(8), 8)), cut(range(12), 12), cut(range(4 + 4 * rank), 8)):
        looks = Looks()
        made.cur_epoch = 0
        made.fit(loader, epochs=1, hooks=[looks])
        found.append(sorted({*looks.found}))
    assert found == expected


def broken() -> Any:
    yield 1
    raise OSError("gone")


def test_the_time_of_a_loader_is_that_of_data():
    class Slow(list[Any]):
        def __iter__(self) -> Any:
            for each in super().__iter__():
                time.sleep(0.05)
                yield each

    seconds: list[float] = []
    hook = BaseHook()
    hook.on_record = lambda trainer, record: seconds.append(record.times["data"])  # type: ignore[method-assign]
    made = make_trainer({})
    made.fit(Slow(cut(range(8), 8)), epochs=1, hooks=[hook])
    made.context.destroy()
    assert len(seconds) == 2
    assert min(seconds) >= 0.05
