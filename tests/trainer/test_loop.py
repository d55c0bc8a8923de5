"""What a loop, its evaluations and its trainer decide, with numbers by hand."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.errors import ConfigError, TrainerError
from colonnade.trainer import trainer as loop_module
from colonnade.trainer.data import EpochPosition, Lengths
from colonnade.trainer.evaluation import _batches_of
from colonnade.trainer.trainer import Loop, Trainer, _Agreed, _divides, _Over, _Rest, _steps
from tests.trainer.test_data import world


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
        context=world(2) if by_itself else world(2, tensor=2),
        engine=SimpleNamespace(gathers_weights=False),
        _hooks=SimpleNamespace(hold=held.append),
        _exchange=SimpleNamespace(sum=lambda mine: asked.append(mine) or mine),
    )
    lengths = Lengths((2, 2) if known else (2, None))
    if by_itself:  # until weights are gathered in each pass
        trainer.engine.gathers_weights = True
        list(_batches_of(trainer, [7], lengths))
        assert asked == ([] if known else [[1.0, 0.0], [0.0, 1.0]])
        asked.clear()
        trainer.engine.gathers_weights = False
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


# -- the loop, epoch by epoch -----------------------------------------------------------------------------


def told(monkeypatch: pytest.MonkeyPatch, script: list[tuple[bool, bool, bool]], **given: Any) -> tuple[Any, list[str]]:
    """A loop whose epochs end as the script says: (epoch_done, stopping, wants to leave); and what it does."""
    heard: list[str] = []
    loop: Any = object.__new__(Loop)
    trainer: Any = object.__new__(Trainer)
    trainer.cur_epoch, trainer._cur_step, trainer.max_epochs, trainer.max_steps = 0, 0, 5, None
    trainer.stopping, trainer.stop_reason, trainer._wants_exit = False, "", False
    trainer.logger = SimpleNamespace(info=lambda text: heard.append("said"))
    vars(trainer).update(given)
    loop._trainer, loop._test_loader, loop._test_interval, loop.resumed = trainer, "test", 1, None
    loop._context = "context"

    def epoch() -> None:
        heard.append(f"epoch {trainer.cur_epoch}")
        trainer.epoch_done, trainer.stopping, trainer._wants_exit = script.pop(0)

    def tested(trainer: Any, loader: Any, agree: Any) -> None:
        assert loader == "test"
        heard.append(f"test {trainer.cur_epoch}")

    monkeypatch.setattr(loop, "_train_epoch", epoch)
    monkeypatch.setattr(loop, "_call", heard.append)
    monkeypatch.setattr(loop, "_agree_to_stop", lambda: heard.append("agree to stop"))
    monkeypatch.setattr(loop_module, "run_test", tested)
    return loop, heard


GOES_ON, ENDS, STOPS, LEAVES = (True, False, False), (False, False, False), (True, True, False), (True, True, True)


@pytest.mark.parametrize(
    ("script", "expected", "epoch"),
    [
        ([GOES_ON] * 5, [f"{what} {at}" for at in range(5) for what in ("epoch", "test")], 5),
        ([GOES_ON, ENDS], ["epoch 0", "test 0", "epoch 1", "test 1"], 1),
        ([GOES_ON, STOPS], ["epoch 0", "test 0", "epoch 1", "test 1", "said"], 2),
        ([GOES_ON, LEAVES], ["epoch 0", "test 0", "epoch 1", "said"], 1),
        ([(False, True, False)], ["epoch 0", "said"], 0),
    ],
)
def test_epochs_are_tested_until_the_run_is_over(monkeypatch, script, expected, epoch):
    loop, heard = told(monkeypatch, list(script))
    loop._train()
    assert [each for each in heard if each not in ("before_train", "agree to stop")] == expected
    assert heard[0] == "before_train"
    assert heard.count("agree to stop") == sum(each.startswith("test") for each in expected)
    assert loop._trainer.cur_epoch == epoch


@pytest.mark.parametrize(("interval", "expected"), [(1, [0, 1, 2, 3, 4]), (2, [1, 3]), (3, [2]), (6, [])])
def test_an_evaluation_comes_after_every_so_many_epochs(monkeypatch, interval, expected):
    loop, heard = told(monkeypatch, [GOES_ON] * 5)
    loop._test_interval = interval
    loop._train()
    assert [each for each in heard if each.startswith("test")] == [f"test {at}" for at in expected]
    without, heard = told(monkeypatch, [GOES_ON] * 5)
    without._test_loader = None
    without._train()
    assert not [each for each in heard if each.startswith("test")]


def test_a_run_that_goes_on_at_the_end_of_an_epoch_has_its_evaluation_first(monkeypatch):
    loop, heard = told(monkeypatch, [GOES_ON] * 4, epoch_done=True)
    loop._train()
    assert [each for each in heard if each.startswith(("epoch", "test"))][:3] == ["test 0", "epoch 1", "test 1"]


@pytest.mark.parametrize(
    ("batches", "epoch_done", "now"), [(0, False, True), (1, False, False), (1, True, True), (0, True, True)]
)
def test_states_are_given_back_at_once_where_no_epoch_goes_on(monkeypatch, batches, epoch_done, now):
    loop, _ = told(monkeypatch, [], epoch_done=epoch_done, stopping=True)
    loop._trainer._place = EpochPosition(batches)
    streams: list[Any] = []
    monkeypatch.setattr(loop_module, "set_random_state", lambda *given: streams.append(given))
    monkeypatch.setattr(loop, "_load_hook_states", lambda: "streams")
    loop.resumed = ("states", "streams")
    loop._train()
    assert streams == ([("streams", "context")] if now else [])
    loop.resumed = None
    loop._train()
    assert len(streams) == now


@pytest.mark.parametrize("fails", [True, False])
def test_hooks_hear_of_the_end_of_a_run_and_whether_it_failed(fails):
    heard: list[str] = []
    loop: Any = object.__new__(Loop)
    loop._engine = SimpleNamespace(train=lambda: heard.append("train"))
    loop._hooks = SimpleNamespace(call=heard.append)
    loop._trainer = SimpleNamespace(failed=False, agree=lambda: heard.append("agree"))
    cause = ValueError("inside")
    error = TrainerError("told")
    error.__cause__ = cause

    def run() -> None:
        heard.append("run")
        if fails:
            raise _Agreed(error)

    loop._train = run
    if fails:
        with pytest.raises(TrainerError, match="told") as caught:
            loop.run()
        assert caught.value.__cause__ is cause
    else:
        loop.run()
    assert heard == ["train", "run", "after_train", *([] if fails else ["agree"])]
    assert loop._trainer.failed is fails


class Stateful:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("loader", [[], Stateful()])
@pytest.mark.parametrize("test_loader", [None, "test"])
def test_what_a_loop_knows_before_it_begins(monkeypatch, device, size, loader, test_loader):
    read: list[Any] = []
    monkeypatch.setattr(
        loop_module, "read_lengths", lambda loader, context: read.append(loader) or Lengths((5,) * size)
    )
    monkeypatch.setattr(loop_module, "moves_together", lambda lengths, context: "together")
    monkeypatch.setattr(loop_module, "agree", lambda context: nullcontext())
    monkeypatch.setattr(loop_module, "speaks", lambda context, pipeline: pipeline)
    context = SimpleNamespace(device=SimpleNamespace(type=device), is_launched=True, world_size=size)
    engine = SimpleNamespace(accumulation=2, schedule=SimpleNamespace(data_process_func=None))
    trainer: Any = SimpleNamespace(engine=engine, _hooks=None, context=context, steps_per_epoch=None)
    loop = Loop(trainer, loader, test_loader, 1)
    assert read == [loader, *([test_loader] if test_loader else [])]
    assert trainer.steps_per_epoch == 3
    assert (loop._together, loop._counts_samples) == ("together", True)
    assert loop._lag == (1 if device == "cuda" else 0)
    assert loop._may_ask_ahead is (device == "cuda" and size == 2 and loader == [])


# -- steps ------------------------------------------------------------------------------------------------


def bare(**given: Any) -> tuple[Any, Any, list[Any]]:
    """A loop without a world, its trainer, and what they do."""
    heard: list[Any] = []
    loop: Any = object.__new__(Loop)
    trainer: Any = object.__new__(Trainer)
    trainer.cur_epoch, trainer._cur_step, trainer.max_epochs, trainer.max_steps, trainer.timer = 3, 7, None, None, None
    trainer.stopping, trainer.step_done, trainer._wants_stop, trainer._wants_exit = False, True, "", False
    trainer.returns_output = "if asked"
    trainer._book = SimpleNamespace(
        restart=lambda: heard.append("restart"),
        add_pass=lambda *given: heard.append(("add_pass", *given)),
        end_step=lambda *given: heard.append(("end_step", *given[:2])),
        draft=lambda: loop.drafts.pop(0) if loop.drafts else None,
    )
    trainer._exchange = SimpleNamespace(start=lambda told: heard.append(told) or (lambda: loop.sums))
    trainer.time = lambda *given: heard.append(given)
    trainer.agree = lambda: heard.append("agree")
    loop._trainer, loop._context, loop.resumed, loop.drafts = trainer, "context", None, []
    loop._hooks = SimpleNamespace(call=lambda *given: heard.append(given), held=None, hold=heard.append)
    loop._waiting, loop._lag, loop._question, loop._told = deque(), 0, None, None
    loop._even, loop._ahead = True, False
    vars(loop).update(given)
    return loop, trainer, heard


@pytest.mark.parametrize(
    ("ended", "stopping", "batches", "is_heard"),
    [
        (True, False, 1, True),
        (True, True, 4, True),
        (False, False, 4, True),
        (False, True, 4, False),
        (False, False, 0, True),
        (True, False, 0, None),
    ],
)
def test_an_epoch_from_its_start_to_its_end(ended, stopping, batches, is_heard):
    loop, trainer, heard = bare(resumed=("states", "streams"))
    trainer.stopping, trainer._place = stopping, EpochPosition(batches)
    loop._train_batches = lambda then: heard.append(f"from {then}") or ended
    loop._load_hook_states = lambda: heard.append("states") or "streams"
    loop.settle = lambda: heard.append("settle")
    loop._agree_to_stop = lambda: heard.append("agree to stop")
    begin = [("start", "Train-epoch"), ("before_train_epoch",), "agree", "states", "restart", "from streams", "agree"]
    if is_heard is None:
        with pytest.raises(ConfigError, match="epoch 3 had no batches on any rank"):
            loop._train_epoch()
        assert heard == begin
        return
    loop._train_epoch()
    end = [("after_train_epoch",), "agree", "agree to stop"] if is_heard else []
    assert heard == [*begin, "settle", ("stop", "Train-epoch"), *end]
    assert trainer.epoch_done is ended
    loop.resumed, trainer._place = None, EpochPosition(1)
    loop._train_epoch()
    assert "from None" in heard


@pytest.mark.parametrize("may_ask", [True, False])
@pytest.mark.parametrize(
    ("together", "lengths", "inside", "even"),
    [
        (False, (4, 4), 0, True),
        (False, (4, 4), 1, False),
        (False, (4, 5), 0, False),
        (False, (5, 5), 0, False),
        (True, (4, 5), 1, True),
    ],
)
def test_batches_are_even_where_ranks_move_together_or_have_whole_steps_left(may_ask, together, lengths, inside, even):
    loop, trainer, heard = bare(_together=together, _lengths=Lengths(lengths), _may_ask_ahead=may_ask)
    trainer._place = EpochPosition(2)
    loop.feed = SimpleNamespace(batches_behind=lambda place: place.batches, inside_batch=lambda place: inside)
    loop._engine = SimpleNamespace(accumulation=2, batches=lambda fetched, none: (f"given {each}" for each in fetched))
    loop._fetched = lambda then: iter_closed([1, 2], heard)
    loop._even_batches = lambda fetched: (f"even {each}" for each in fetched)
    loop._pass = heard.append
    assert loop._train_batches(None) is True
    kind = "even" if even else "given"
    assert heard == [f"{kind} 1", f"{kind} 2", "closed"]
    assert (loop._even, loop._ahead) == (even, may_ask and even)

    def over(batch: Any) -> None:
        raise _Over

    loop._pass = over
    assert loop._train_batches(None) is False


def iter_closed(items: list[Any], heard: list[Any]) -> Any:
    try:
        yield from items
    finally:
        heard.append("closed")


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("stepped", [True, False])
def test_a_batch_is_learnt_from_and_written_down(counts, stepped):
    loop, trainer, heard = bare(_counts_samples=counts)
    loop._engine = SimpleNamespace(
        zero_grad=lambda: heard.append("zero_grad"),
        execute_schedule=lambda batches, **asked: (
            heard.append((*batches, asked)) or ("out", "label", torch.tensor(2.0))
        ),
        step=lambda: heard.append("step") or stepped,
        schedule=SimpleNamespace(batch_size=3),
        loss_count=None,
        accumulation=4,
    )
    loop.feed = SimpleNamespace(after=lambda place, batches: EpochPosition(place.batches + batches))
    loop._between_steps = lambda: heard.append("between")
    loop._pass("batch")
    loss = torch.tensor(2.0)
    assert heard == [
        ("before_train_iter",),
        ("start", "Train-step"),
        "zero_grad",
        ("batch", {"return_output_label": "if asked"}),
        "step",
        ("stop", "Train-step"),
        ("add_pass", 6.0, 3.0, 3 if counts else 0),
        *([("end_step", 8, 3)] if stepped else []),
        ("after_train_iter", "out", "label", loss),
        *(["between"] if stepped else []),
    ]
    assert (trainer.cur_step, trainer._place.batches) == ((8, 4) if stepped else (7, 0))
    assert trainer.step_done is stepped
    heard.clear()
    loop._no_batch()
    assert trainer.batch_weight == (None, 0.0)
    assert heard == [("end_step", trainer.cur_step, 3), ("after_train_iter", None, None, None), "between"]
    assert trainer.step_done is True


@pytest.mark.parametrize(
    ("stopping", "max_steps", "even", "expected"),
    [
        (False, None, True, ["line"]),
        (False, None, False, ["ask True", "answer", "line"]),
        (True, None, True, ["agree"]),
        (False, 7, False, ["agree"]),
        (False, 8, True, ["line"]),
    ],
)
def test_between_two_steps(stopping, max_steps, even, expected):
    loop, trainer, heard = bare(_even=even)
    trainer.stopping, trainer.max_steps = stopping, max_steps
    loop._ask = lambda has_batch: heard.append(f"ask {has_batch}")
    loop._answer = lambda: heard.append("answer")
    loop._put_in_line = lambda: heard.append("line")
    if expected == ["agree"]:
        with pytest.raises(_Over):
            loop._between_steps()
    else:
        loop._between_steps()
    assert heard == expected


@pytest.mark.parametrize("ahead", [True, False])
def test_ranks_ask_for_the_next_batch_before_a_step_or_after_it(ahead):
    loop, _, heard = bare(_ahead=ahead)
    answers = [True, True, False]
    loop._ask = lambda has_batch: heard.append(f"ask {has_batch}")
    loop._answer = lambda: answers.pop(0)
    loop.feed = SimpleNamespace(look_ahead=lambda: heard.append("ahead"))
    for batch in loop._even_batches(iter(["a", "b"])):
        heard.append(batch)
    if ahead:
        assert heard == ["ask True", "ahead", "ask True", "a", "ahead", "ask False", "b"]
    else:
        assert heard == ["ask True", "a", "ask True", "b", "ask False"]


def test_the_error_of_a_loader_is_held_and_its_time_is_that_of_data():
    loop, trainer, heard = bare()
    trainer.clock = SimpleNamespace(enter=lambda phase: heard.append(phase) or "before")
    loop.feed = SimpleNamespace(open=lambda *given: heard.append(given[0]) or broken())
    assert list(loop._fetched(None)) == [1]
    *phases, error = heard
    assert phases == [3, "data", "before", "data"]
    assert str(error).startswith("the training data loader failed in epoch 3, after step 7: OSError: gone")
    assert isinstance(error.__cause__, OSError)
    heard.clear()
    loop.feed = SimpleNamespace(open=lambda *given: iter([5]))
    assert list(loop._fetched(None)) == [5]
    assert heard == ["data", "before", "data", "before"]


@pytest.mark.parametrize("lag", [0, 1])
def test_what_a_rank_tells_the_others_and_hears_of_them(lag):
    loop, trainer, heard = bare(_lag=lag)
    drafts = [
        SimpleNamespace(sums=lambda at=at: [at, at, at], record=lambda sums, at=at: (at, sums)) for at in (1.0, 2.0)
    ]
    loop._waiting.extend(drafts)
    loop.sums = [0.0, 2.0, 0.0, 0.0, 0.0, 7.0, 8.0, 9.0]
    loop._ask(True)
    told = [0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    assert heard == [told]
    assert len(loop._waiting) == 1
    assert loop._answer() is True
    assert heard == [told, ("on_record", (1.0, [7.0, 8.0, 9.0]))]
    trainer._wants_stop, trainer._wants_exit, loop._hooks.held = "why", True, "error"
    heard.clear()
    loop._ask(False)
    told = [1.0, 0.0, 1.0, 1.0, 1.0, *([2.0] * 3 if lag == 0 else [0.0] * 3)]
    assert heard == [told]
    loop.sums = [1.0, 0.0, 2.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert loop._answer() is False
    assert heard[-1] == "agree"
    assert (trainer.stopping, trainer.stop_reason) == (True, "why")
    heard.clear()
    loop._hear()  # there is nothing to hear
    assert heard == []


@pytest.mark.parametrize("have", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("stopping", [True, False])
@pytest.mark.parametrize("step_done", [True, False])
def test_a_run_that_asks_ahead_ends_when_the_step_is_made(have, ahead, stopping, step_done):
    loop, trainer, heard = bare(_ahead=ahead)
    trainer.stopping, trainer.step_done, trainer.stop_reason = stopping, step_done, ""
    loop.sums = [0.0, float(have), float(not have), 0.0, 0.0, 0.0, 0.0, 0.0]
    loop._ask(have)
    if have and ahead and stopping and step_done:
        with pytest.raises(_Over):
            loop._answer()
    else:
        assert loop._answer() is have
    assert "agree" not in heard


@pytest.mark.parametrize("has_batch", [True, False])
def test_a_rank_without_a_batch_says_so_where_others_have_one(has_batch):
    loop, _, heard = bare()
    loop.sums = [0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    loop._ask(has_batch)
    heard.clear()
    loop._answer()
    assert heard[-1] == "agree"
    said = [str(each) for each in heard if isinstance(each, TrainerError)]
    assert [text.partition(" while")[0] for text in said] == (
        [] if has_batch else ["this rank ran out of batches in epoch 3 after step 7"]
    )


def test_records_that_wait_are_finished_and_states_are_given_to_hooks():
    loop, trainer, heard = bare()
    drafts = [SimpleNamespace(sums=lambda at=at: [at], record=lambda sums, at=at: (at, sums)) for at in (1.0, 2.0)]
    loop._waiting.append(drafts[0])
    loop.drafts = [drafts[1]]
    trainer._exchange.sum = lambda mine: [10 * each for each in mine]
    loop.settle()
    assert heard == [("on_record", (1.0, [10.0])), ("on_record", (2.0, [20.0]))]
    heard.clear()
    trainer._wants_stop = "why"
    loop._agree_to_stop()
    assert (trainer.stopping, trainer.stop_reason) == (True, "why")
    loop.resumed = ("states", "streams")
    loop._hooks.load_state_dict = heard.append
    assert loop._load_hook_states() == "streams"
    assert (heard, loop.resumed) == (["states", "agree"], None)

    def disagree() -> None:
        raise TrainerError("of another rank")

    trainer.agree = disagree
    with pytest.raises(_Agreed, match="of another rank"):
        loop._call("before_train")
