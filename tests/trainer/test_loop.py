"""What a loop, its evaluations and its trainer decide, with numbers by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.errors import ConfigError, TrainerError
from colonnade.trainer.data import Lengths
from colonnade.trainer.evaluation import _batches_of
from colonnade.trainer.loop import Loop, _divides, _steps
from colonnade.trainer.trainer import Trainer, _Rest


@pytest.mark.parametrize(
    ("lengths", "behind", "accumulation", "steps", "divides"),
    [
        ((4, 4), 0, 2, 2, True),
        ((5, 5), 0, 2, 3, False),
        ((5, 5), 1, 2, 3, True),
        ((5, 5), 1, 3, 2, False),
        ((5, 5), 2, 3, 2, True),
        ((4, 6), 0, 2, 3, False),
        ((4, None), 0, 2, None, False),
        ((None, None), 0, 1, None, False),
        ((7,), 0, 1, 7, True),
        ((0, 0), 0, 1, 0, True),
    ],
)
def test_how_many_steps_an_epoch_has_and_whether_they_are_whole(lengths, behind, accumulation, steps, divides):
    known = Lengths(lengths)
    assert _steps(known, accumulation) == steps
    assert bool(_divides(known, behind, accumulation)) is divides
    assert known.known is (None not in lengths)
    assert known.equal is (len({*lengths}) == 1)


@pytest.mark.parametrize(
    ("stopping", "max_epochs", "max_steps", "is_over"),
    [
        (False, None, 6, False),
        (False, None, 5, True),
        (False, None, 4, True),
        (False, 3, None, False),
        (False, 2, None, True),
        (False, 1, None, True),
        (False, 3, 6, False),
        (False, 3, 5, True),
        (False, 2, 6, True),
        (True, 3, 6, True),
    ],
)
def test_a_run_is_over_when_it_is_stopped_or_has_its_epochs_or_its_steps(stopping, max_epochs, max_steps, is_over):
    loop: Any = object.__new__(Loop)
    loop._trainer = SimpleNamespace(
        stopping=stopping, max_epochs=max_epochs, max_steps=max_steps, cur_epoch=2, cur_step=5
    )
    assert bool(loop._is_over()) is is_over


@pytest.mark.parametrize(
    ("stops", "exits", "wants", "stopping", "expected"),
    [
        (0.0, 0.0, "", False, (False, "", False)),
        (1.0, 0.0, "mine", False, (True, "mine", False)),
        (1.0, 1.0, "", False, (True, "asked for by another rank", True)),
        (1.0, 0.0, "second", True, (True, "", False)),
        (0.0, 1.0, "", False, (False, "", True)),
    ],
)
def test_all_ranks_stop_where_one_wants_to(stops, exits, wants, stopping, expected):
    loop: Any = object.__new__(Loop)
    loop._trainer = SimpleNamespace(stopping=stopping, stop_reason="", _wants_stop=wants, _wants_exit=False)
    loop._note_stop(stops, exits)
    found = loop._trainer
    assert (found.stopping, found.stop_reason, found._wants_exit) == expected
    loop._trainer._wants_exit = True
    loop._note_stop(0.0, 0.0)
    assert loop._trainer._wants_exit is True


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
    trainer: Any = object.__new__(Trainer)
    trainer.max_epochs, trainer.steps_per_epoch, trainer.max_steps = max_epochs, steps_per_epoch, max_steps
    assert trainer.total_steps == total


@pytest.mark.parametrize("name", ["epochs", "max_steps", "test_interval"])
def test_limits_are_whole_numbers_from_1_on(name):
    trainer: Any = object.__new__(Trainer)
    limits = {"epochs": 1, "max_steps": 1, "test_interval": 1}
    trainer._set_limits(**limits)
    assert (trainer.max_epochs, trainer.max_steps) == (1, 1)
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ConfigError) as error:
            trainer._set_limits(**{**limits, name: wrong})
        assert str(error.value).startswith(f"{name} is a whole number from 1 on, not {wrong!r}")
    for alone in ({"epochs": 2}, {"max_steps": 2}):
        trainer._set_limits(**{"epochs": None, "max_steps": None, "test_interval": 1, **alone})
    assert (trainer.max_epochs, trainer.max_steps) == (None, 2)
    with pytest.raises(ConfigError, match=r"^fit needs epochs= or max_steps="):
        trainer._set_limits(None, None, 1)


def test_a_trainer_is_asked_to_stop_for_the_first_reason_and_leaves_if_any_says_so():
    trainer: Any = object.__new__(Trainer)
    trainer._wants_stop, trainer._wants_exit = "", False
    trainer.request_stop("one")
    assert (trainer._wants_stop, trainer._wants_exit) == ("one", False)
    trainer.request_stop("two", leave=True)
    trainer.request_stop("three")
    assert (trainer._wants_stop, trainer._wants_exit) == ("one", True)


def test_a_checkpoint_of_something_else_is_refused_before_anything_is_taken_of_it():
    taken: list[Any] = []
    engine: Any = SimpleNamespace(extra_state=lambda: {"engine.clip": 1}, load_extra_state=taken.append)
    rest = _Rest(engine)
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
    trainer: Any = SimpleNamespace(
        context=SimpleNamespace(world_size=2, data_parallel_size=2 if by_itself else 1),
        _hooks=SimpleNamespace(hold=held.append),
        _exchange=SimpleNamespace(sum=lambda mine: asked.append(mine) or mine),
    )
    lengths = Lengths((2, 2) if known else (2, None))
    assert list(_batches_of(trainer, [7, 8], lengths)) == [7, 8]
    assert asked == ([] if by_itself or known else [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    if by_itself:
        assert list(_batches_of(trainer, broken(), lengths)) == [1]
        assert [str(error) for error in held] == ["the data loader failed: OSError: gone [C090]"]
        assert isinstance(held[0].__cause__, OSError)
    else:
        with pytest.raises(OSError, match="gone"):
            list(_batches_of(trainer, broken(), lengths))
        assert held == []
