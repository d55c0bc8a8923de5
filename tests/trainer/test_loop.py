"""A run from its first hook to its last, in one process; and what the ranks add up between two steps."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.errors import ConfigError, HookError, TrainerError
from colonnade.testing import run_world
from colonnade.trainer import BaseHook, Trainer, trainer
from colonnade.trainer.data import EpochPosition, Lengths
from colonnade.trainer.evaluation import _batches_of
from colonnade.trainer.hooks import LoadCheckpointHook, LossHook, SaveCheckpointHook
from colonnade.trainer.hooks.hook import POINTS, HookList
from colonnade.trainer.records import StepSums
from colonnade.trainer.trainer import _AgreedError, _EndOfTraining, _ExtraOfRun
from tests.trainer.runs import cut, make_trainer
from tests.trainer.test_data import world


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
        assert str(error.value).startswith(f"{name} must be an int >= 1, not {wrong!r}")
    with pytest.raises(ConfigError, match=r"^fit would never end; give epochs= or max_steps="):
        made.fit([])


@pytest.mark.parametrize(
    ("max_epochs", "steps_per_epoch", "max_steps", "total"),
    [
        (None, None, None, None),
        (2, None, None, None),
        (None, 5, None, None),
        (2, 5, None, 10),
        (2, 5, 7, 7),
        (2, 5, 12, 10),
        (2, None, 12, 12),
        (None, 5, 12, 12),
    ],
)
def test_how_many_steps_a_run_will_have(max_epochs, steps_per_epoch, max_steps, total):
    made: Any = object.__new__(Trainer)
    made.max_epochs, made.steps_per_epoch, made.max_steps = max_epochs, steps_per_epoch, max_steps
    assert made.total_steps == total


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


# -- between two steps ------------------------------------------------------------------------------------


class Numbers:
    """Stands for the numbers of a step on this rank."""

    def __init__(self, value: float) -> None:
        self.value = value

    def sums(self) -> list[float]:
        return [self.value] * 3

    def record(self, sums: list[float]) -> Any:
        return self.value, sums


@pytest.mark.parametrize("lag", [0, 1])
def test_flags_are_added_up_with_the_numbers_of_a_step_so_many_steps_ago(lag):
    sent: list[list[float]] = []
    exchange: Any = SimpleNamespace(
        start=lambda numbers: sent.append(numbers) or (lambda: [2 * each for each in numbers]),
        sum=lambda numbers: [10 * each for each in numbers],
    )
    records: list[Any] = []
    sums = StepSums(exchange, lag, records.append, 3)
    sums.wait()  # nothing was begun
    for value in (1.0, 2.0):
        sums.add(Numbers(value))  # type: ignore[arg-type]
    sums.add(None)
    sums.start([True, False])
    assert sent == [[1.0, 0.0, 1.0, 1.0, 1.0]]
    assert records == []
    sums.wait()  # a checkpoint does so in the middle of a step
    assert sums.finish() == [2.0, 0.0]
    assert records == [(1.0, [2.0] * 3)]
    sums.start([False, True])
    assert sent[1] == [0.0, 1.0, *([2.0] * 3 if lag == 0 else [0.0] * 3)]
    assert sums.finish() == [0.0, 2.0]
    sums.add(Numbers(3.0))  # type: ignore[arg-type]
    sums.drain()
    assert records[1:] == ([(2.0, [4.0] * 3)] if lag == 0 else [(2.0, [20.0] * 3)]) + [(3.0, [30.0] * 3)]


def between(**given: Any) -> tuple[Any, Any]:
    """A trainer and its run, whose sums are what `given` says."""
    fit: Any = SimpleNamespace(ahead=False, hooks=HookList(None, []), sums=SimpleNamespace(finish=lambda: fit.told))
    made: Any = object.__new__(Trainer)
    made._hooks, made._fit, made.context = fit.hooks, fit, SimpleNamespace(is_launched=False)
    made.cur_epoch, made._cur_step, made.stopping, made.stop_reason = 3, 7, False, ""
    made.step_done, made._wants_stop, made._wants_exit = True, "", False
    vars(made).update(given)
    return made, fit


@pytest.mark.parametrize("have", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("stopping", [True, False])
@pytest.mark.parametrize("step_done", [True, False])
def test_a_run_that_asks_ahead_ends_when_the_step_is_made(have, ahead, stopping, step_done):
    made, fit = between(stopping=stopping, step_done=step_done)
    fit.ahead, fit.told = ahead, [0.0, float(have), float(not have), 0.0, 0.0]
    if have and ahead and stopping and step_done:
        with pytest.raises(_EndOfTraining):
            made._finish_sums(fit, have)
    else:
        assert made._finish_sums(fit, have) is have


def test_a_rank_without_a_batch_says_so_where_others_have_one():
    made, fit = between()
    fit.told = [0.0, 1.0, 1.0, 0.0, 0.0]
    with pytest.raises(_AgreedError, match="this rank ran out of batches in epoch 3 after step 7"):
        made._finish_sums(fit, has_batch=False)


@pytest.mark.parametrize(
    ("stops", "exits", "wants", "stopping", "expected"),
    [
        (0.0, 0.0, "", False, (False, "", False)),
        (1.0, 0.0, "mine", False, (True, "mine", False)),
        (1.0, 1.0, "", False, (True, "requested by another rank", True)),
        (1.0, 0.0, "second", True, (True, "", False)),
        (0.0, 1.0, "", False, (False, "", True)),
    ],
)
def test_all_ranks_stop_where_one_wants_to(stops, exits, wants, stopping, expected):
    made, fit = between(stopping=stopping, _wants_stop=wants)
    fit.told = [0.0, 1.0, 0.0, stops, exits]
    made._finish_sums(fit, True)
    assert (made.stopping, made.stop_reason, made._wants_exit) == expected
    made._wants_exit, fit.told = True, [0.0, 1.0, 0.0, 0.0, 0.0]
    made._finish_sums(fit, True)
    assert made._wants_exit is True


def test_a_trainer_is_asked_to_stop_for_the_first_reason_and_leaves_if_any_says_so():
    made, _ = between()
    for reason, leave, expected in (("one", False, False), ("two", True, True), ("three", False, True)):
        made.request_stop(reason, leave)
        assert (made._wants_stop, made._wants_exit) == ("one", expected)


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


def treated(device_asks: bool, accumulation: int) -> list[list[tuple[bool, bool]]]:
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
    return found


@pytest.mark.parametrize(
    ("device_asks", "accumulation", "expected"),
    [
        (True, 1, [[(True, True)], [(True, False)], [(True, True)], [(False, False)]]),
        (False, 1, [[(True, False)], [(True, False)], [(True, False)], [(False, False)]]),
        (True, 2, [[(True, True)], [(True, False)], [(False, False)], [(False, False)]]),  # three batches: half a step
    ],
)
def test_batches_are_equal_and_read_ahead_where_all_ranks_have_whole_steps_left(device_asks, accumulation, expected):
    for found in run_world(2, treated, device_asks, accumulation).values:
        assert found == expected


# -- what a run takes and is given ------------------------------------------------------------------------


def test_a_checkpoint_of_something_else_is_refused_before_anything_is_taken_of_it():
    taken: list[Any] = []
    engine: Any = SimpleNamespace(extra_state=lambda: {"engine.clip": 1}, load_extra_state=taken.append)
    rest = _ExtraOfRun(engine)
    assert rest.state_dict() == {"trainer": {"data": {}}, "hooks": {}, "engine.clip": 1}
    with pytest.raises(TypeError):
        rest.load_state_dict({"trainer": {"data": {"page": 3}}, "hooks": {}})
    assert taken == []
    whole = {"trainer": {"data": {"batches": 3}}, "hooks": {}}
    rest.load_state_dict(whole)
    assert taken == [whole]


def broken() -> Any:
    yield 1
    raise OSError("gone")


@pytest.mark.parametrize("by_itself", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_ranks_ask_each_other_for_batches_only_where_a_pass_goes_over_several(by_itself, known):
    held: list[TrainerError] = []
    asked: list[list[float]] = []
    hooks: Any = SimpleNamespace(hold=held.append)
    exchange: Any = SimpleNamespace(sum=lambda mine: asked.append(mine) or mine)
    made: Any = SimpleNamespace(
        context=world(2) if by_itself else world(2, tensor=2), engine=SimpleNamespace(gathers_weights=False)
    )
    lengths = Lengths((2, 2) if known else (2, None))
    if by_itself:  # until weights are gathered in each pass
        made.engine.gathers_weights = True
        list(_batches_of(made, [7], lengths, hooks, exchange))
        assert asked == ([] if known else [[1.0, 0.0], [0.0, 1.0]])
        asked.clear()
        made.engine.gathers_weights = False
    assert list(_batches_of(made, [7, 8], lengths, hooks, exchange)) == [7, 8]
    assert asked == ([] if by_itself or known else [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    if by_itself:
        assert list(_batches_of(made, broken(), lengths, hooks, exchange)) == [1]
        assert [str(error) for error in held] == ["the data loader failed: OSError: gone [C090]"]
        assert isinstance(held[0].__cause__, OSError)
    else:
        with pytest.raises(OSError, match="gone"):
            list(_batches_of(made, broken(), lengths, hooks, exchange))
        assert held == []
    exchange.sum = lambda mine: (3.0, 1.0)
    if not by_itself and not known:
        with pytest.raises(TrainerError, match=r"^1 of 2 ranks have run out of batches before the others, but every"):
            list(_batches_of(made, [7], lengths, hooks, exchange))


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
