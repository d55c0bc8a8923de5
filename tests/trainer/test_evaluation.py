"""Predictions in one process: which samples they are of, padded to one length, in the order of the dataset."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from colonnade.engine.schedule.micro_batch import join
from colonnade.errors import ConfigError
from colonnade.trainer import evaluation
from colonnade.trainer.evaluation import (
    _evaluating,
    _filled,
    _in_dataset_order,
    _indices,
    _join_padded,
    predict,
    run_test,
)
from tests.trainer.test_data import world

ROWS = list(range(5))


class Named:
    """A sampler of names."""

    def __iter__(self) -> Any:
        return iter([0, *"bcde"])

    def __len__(self) -> int:
        return 5


def test_the_samples_of_a_loader_are_known_beforehand():
    assert _indices(DataLoader(ROWS, 2)).tolist() == ROWS
    assert _indices(DataLoader(ROWS, 2, drop_last=True)).tolist() == [0, 1, 2, 3]
    reversed_ones = BatchSampler(list(reversed(ROWS)), 2, False)  # type: ignore[arg-type]
    assert _indices(DataLoader(ROWS, batch_sampler=reversed_ones)).tolist() == [4, 3, 2, 1, 0]
    assert _indices([ROWS]) is None
    assert _indices(DataLoader(ROWS, None)) is None
    assert _indices(DataLoader(dict.fromkeys("abcde", 1), 2, sampler=Named())) is None  # type: ignore[arg-type]
    for sampler in (RandomSampler(ROWS), WeightedRandomSampler([1.0] * 5, 5)):
        with pytest.raises(ConfigError, match=r"^predict returns outputs in dataset order; use a loader with"):
            _indices(DataLoader(ROWS, 2, sampler=sampler))
    assert _indices(DataLoader(ROWS, 2, sampler=SequentialSampler(ROWS))).tolist() == ROWS


def test_a_sampler_with_a_state_is_where_it_was():
    class Stateful(SequentialSampler):
        passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            return super().__iter__()

        def state_dict(self) -> dict[str, int]:
            return {"passes": self.passes}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.passes = state["passes"]

    sampler = Stateful(ROWS)
    assert _indices(DataLoader(ROWS, 2, sampler=sampler)).tolist() == ROWS
    assert sampler.passes == 0


def test_outputs_of_unequal_lengths_are_filled_up():
    short, long = torch.ones(1, 2, 1), torch.full((2, 1, 3), 2.0)
    filled = _filled(short, long)
    assert filled[0].tolist() == [[[1, -100, -100], [1, -100, -100]]]
    assert filled[1].tolist() == [[[2, 2, 2], [-100, -100, -100]]] * 2
    for alone in ([torch.ones(2), torch.ones(3)], [torch.ones(1, 2), "text"], [torch.ones(1, 2), torch.ones(1, 2, 3)]):
        assert all(one is other for one, other in zip(_filled(*alone), alone, strict=True))
    same = torch.ones(2, 3)
    assert all(each is same for each in _filled(same, same))
    joined = _join_padded([{"a": torch.ones(1, 2), "b": torch.ones(1)}, {"a": torch.zeros(1, 1), "b": torch.zeros(1)}])
    assert joined["a"].tolist() == [[1, 1], [0, -100]]
    assert joined["b"].tolist() == [1, 0]
    other = [{"a": torch.ones(1, 2)}, {"a": torch.ones(1, 2)}, {"b": torch.ones(1, 2)}]
    assert all(one is two for one, two in zip(_join_padded(other), other, strict=True))


def test_outputs_stand_in_the_order_of_the_dataset_and_each_once():
    def part(indices: list[int] | None, *rows: float) -> dict[str, Any]:
        output = {"x": torch.tensor(rows), "one": torch.tensor([9.0, 9.0]), "wide": torch.tensor(rows)[:, None]}
        return {"indices": None if indices is None else torch.tensor(indices), "output": output}

    assert _in_dataset_order([], join) is None
    found = _in_dataset_order([part([0, 2, 0], 10.0, 12.0, 99.0), part([1, 3], 11.0, 13.0)], join)
    assert found["x"].tolist() == [10.0, 11.0, 12.0, 13.0]  # the first output of each
    assert found["wide"].tolist() == [[10.0], [11.0], [12.0], [13.0]]
    assert found["one"].tolist() == [9.0] * 4
    twice = [part([*range(3000)], *map(float, range(3000))), part([*range(3000)], *[-1.0] * 3000)]
    assert _in_dataset_order(twice, join)["x"].tolist() == [*range(3000)]
    unknown = _in_dataset_order([part([1], 11.0), part(None, 10.0)], join)
    assert unknown["x"].tolist() == [11.0, 10.0]


@pytest.mark.parametrize("training", [True, False])
def test_an_engine_evaluates_without_gradients_and_is_then_as_it_was(training):
    told: list[str] = []
    engine: Any = SimpleNamespace(
        training=training, eval=lambda: told.append("eval"), train=lambda: told.append("train")
    )
    with _evaluating(engine):
        assert not torch.is_grad_enabled()
        assert told == ["eval"]
    assert told == (["eval", "train"] if training else ["eval"])
    assert torch.is_grad_enabled()


class Measured:
    """A trainer that writes down what an evaluation does."""

    def __init__(self, gives_loss: bool = True, hooks: Any = (), outputs: Any = None, own: Any = None) -> None:
        self.told: list[Any] = []
        self.exchange = None  # nobody is asked
        self.hooks = SimpleNamespace(hooks=hooks, call=lambda point, *given: self.told.append((point, *given)))
        self.context = SimpleNamespace(**vars(world(1)), is_launched=False, get_global_rank=lambda: 0)
        self.returns_output, self.batch_weight = "if asked", None
        self.outputs = outputs or {}
        self.engine: Any = SimpleNamespace(
            gives_loss=gives_loss,
            gathers_weights=False,
            training=True,
            eval=lambda: self.told.append("eval"),
            train=lambda: self.told.append("train"),
            execute_schedule=self.execute,
            schedule=SimpleNamespace(batch_size=3),
            loss_count=None,
            own_loss=own,
        )

    def execute(self, batches: Any, **asked: Any) -> Any:
        (batch,) = batches
        self.told.append((batch, asked))
        if batch == "bad":
            raise ZeroDivisionError
        return self.outputs.get(batch, "output"), "label", torch.tensor(2.0)

    def agree(self) -> None:
        self.told.append("agree")


def test_an_evaluation_calls_hooks_in_their_order():
    trainer: Any = Measured()
    run_test(trainer, ["one"], trainer.hooks, trainer.exchange)
    asked = {"forward_only": True, "return_loss": True, "return_output_label": "if asked"}
    assert trainer.told == [
        ("before_test",),
        ("before_test_epoch",),
        "eval",
        ("before_test_iter",),
        ("one", asked),
        ("after_test_iter", "output", "label", torch.tensor(2.0)),
        "train",
        ("after_test_epoch",),
        ("after_test",),
    ]
    assert trainer.batch_weight == (6.0, 3.0)
    failing: Any = Measured()
    with pytest.raises(ZeroDivisionError):
        run_test(failing, ["bad"], failing.hooks, failing.exchange)
    assert failing.told[-2:] == ["train", ("after_test",)]


@pytest.mark.parametrize(
    ("gives_loss", "needs", "expected"),
    [(False, [], False), (False, [False, True], True), (False, [False, False], False), (True, [False], True)],
)
def test_an_evaluation_has_a_loss_where_one_is_known_or_a_hook_needs_it(gives_loss, needs, expected):
    trainer: Any = Measured(gives_loss, [SimpleNamespace(needs_loss=need) for need in needs])
    run_test(trainer, ["one"], trainer.hooks, trainer.exchange)
    (asked,) = [told[1] for told in trainer.told if told[0] == "one"]
    assert asked["return_loss"] is expected


@pytest.mark.parametrize("own", [None, SimpleNamespace(predictions=lambda output: output * 2)])
def test_predictions_are_the_outputs_of_all_batches(monkeypatch, own):
    outputs = {"one": torch.ones(1, 2, requires_grad=True), "two": torch.zeros(2, 2 if own is None else 1)}
    trainer: Any = Measured(outputs=outputs, own=own)
    found = predict(trainer, ["one", "two"], trainer.hooks, trainer.exchange)
    if own is None:
        assert found.tolist() == [[1, 1], [0, 0], [0, 0]]
    else:  # filled up
        assert found.tolist() == [[2, 2], [0, -100], [0, -100]]
    assert not found.requires_grad
    asked = {"forward_only": True, "return_loss": False}
    assert trainer.told == ["eval", ("one", asked), ("two", asked), "train", "agree"]
    nothing: Any = Measured(own=own)
    nothing.execute = nothing.engine.execute_schedule = lambda batches, **asked: (None, None, None)
    assert predict(nothing, ["one"], nothing.hooks, nothing.exchange) is None
    monkeypatch.setattr(evaluation, "is_first_with_data", lambda context: False)
    assert predict(trainer, ["one"], trainer.hooks, trainer.exchange) is None  # another rank gives the same
