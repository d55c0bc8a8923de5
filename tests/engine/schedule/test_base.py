"""What a schedule does to a batch before any model sees it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from colonnade.engine.schedule.schedules import BaseSchedule, checked_result, move, num_rows
from colonnade.errors import ScheduleError

ONE, TWO = torch.ones(3, 2), torch.zeros(5)


class Plain(BaseSchedule):
    def forward_back_step(self, *args: Any, **kwargs: Any) -> Any: ...


def prepared(criterion: Any = F.mse_loss, model: Any = None, **engine: Any) -> Plain:
    schedule = Plain()
    schedule.pre_processing(
        SimpleNamespace(
            context=SimpleNamespace(device=torch.device("cpu")),
            criterion=criterion,
            model=nn.Linear(2, 2) if model is None else model,
            **engine,
        )
    )
    return schedule


@pytest.mark.parametrize(
    ("batch", "data", "label"),
    [
        ((ONE, TWO), ONE, TWO),
        ([ONE, None], ONE, None),
        (ONE, ONE, None),
        ({"x": ONE, "labels": TWO}, {"x": ONE}, TWO),
        ({"x": ONE, "label": TWO}, {"x": ONE}, TWO),
        ({"x": ONE, "labels": TWO, "label": ONE}, {"x": ONE, "label": ONE}, TWO),
        ({"x": ONE}, {"x": ONE}, None),
    ],
)
def test_a_batch_is_taken_apart(batch, data, label):
    assert prepared().load_batch(iter([batch])) == (data, label)


def test_a_dict_goes_in_whole_where_nobody_else_takes_its_labels():
    batch = {"x": ONE, "labels": TWO}
    for schedule in (prepared(criterion=None), prepared(criterion=lambda output: output), Plain()):
        assert schedule.load_batch(iter([batch])) == (batch, None)
    needs = prepared(model=lambda x, labels: x)
    assert needs.load_batch(iter([batch])) == (batch, None)


def test_a_model_with_a_loss_of_its_own_says_how_a_dict_is_taken_apart():
    own = SimpleNamespace(unpack_batch=lambda batch: (batch["x"], "label"))
    assert prepared(own_loss=own).load_batch(iter([{"x": ONE}])) == (ONE, "label")
    assert prepared(own_loss=own, criterion=None).load_batch(iter([{"x": ONE}])) == ({"x": ONE}, None)
    assert prepared(own_loss=own).load_batch(iter([(ONE, TWO)])) == (ONE, TWO)


def test_a_function_of_the_user_comes_first_and_the_rows_are_counted():
    schedule = Plain(lambda batch: (batch["b"], batch["a"]))
    assert schedule.batch_size == 0
    assert schedule.load_batch(iter([{"a": ONE, "b": TWO}])) == (TWO, ONE)
    assert schedule.batch_size == 5


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((1, 2, 3), "a batch must be (data, label), a dict or a tensor, but the loader returned a tuple of 3. "),
        ([1], "a batch must be (data, label), a dict or a tensor, but the loader returned a list of 1. "),
        ("text", "a batch must be (data, label), a dict or a tensor, but the loader returned a str. "),
    ],
)
def test_what_is_no_batch_is_said(batch, message):
    with pytest.raises(ScheduleError) as error:
        prepared().load_batch(iter([batch]))
    assert str(error.value).startswith(message + "pass data_process_func=lambda batch: (data, label) to the schedule")


def test_without_an_iterator_it_is_said():
    with pytest.raises(
        ScheduleError, match=r"^this schedule needs a data iterator on this rank, but got None\. Pass iter"
    ):
        prepared().load_batch(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("result", [None, (1, 2), (1, 2, 3, 4), "abc", ONE])
def test_a_result_is_output_label_and_loss(result):
    assert checked_result(Plain(), [1, None, TWO]) == (1, None, TWO)
    with pytest.raises(
        ScheduleError, match=r"^Plain.forward_back_step\(\) returned .*\. Return \(output, label, loss\)"
    ):
        checked_result(Plain(), result)


def test_tensors_in_anything_are_moved_and_counted():
    moved = move({"a": [ONE, 3], "b": "text"}, torch.device("meta"))
    assert moved["a"][0].device.type == "meta"
    assert (moved["a"][1], moved["b"]) == (3, "text")
    assert num_rows({"a": 1, "b": [torch.tensor(3.0), TWO, ONE]}) == 5
    assert num_rows([ONE]) == 3
    assert num_rows("text") == 0


def test_a_batch_goes_to_the_device_of_the_engine_unless_it_is_told_not_to():
    schedule = prepared()
    schedule.device = torch.device("meta")
    for to_gpu, device in ((True, "meta"), (False, "cpu")):
        data, label = schedule.load_batch(iter([(ONE, TWO)]), to_gpu)
        assert (data.device.type, label.device.type) == (device, device)


def test_classes_beside_it_hear_of_their_subclasses():
    told: list[Any] = []

    class Listens:
        def __init_subclass__(cls, tag: str) -> None:
            told.append((cls.__name__, tag))

    class Both(BaseSchedule, Listens, tag="mine"):
        def forward_back_step(self, *args: Any, **kwargs: Any) -> Any: ...

    assert told == [("Both", "mine")]


def test_the_name_of_the_ancestor_is_taken():
    class Old(BaseSchedule):
        def forward_backward_step(self, *args: Any, **kwargs: Any) -> Any:
            return "old"

    class Both(Old):
        def forward_back_step(self, *args: Any, **kwargs: Any) -> Any:
            return "new"

        def forward_backward_step(self, *args: Any, **kwargs: Any) -> Any:
            return "old"

    assert (Old().forward_back_step(), Both().forward_back_step()) == ("old", "new")
    assert (Old.runs_backward, Old.uses_batch) == (False, True)
