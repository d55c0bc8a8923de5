"""Batches that are dicts, models that return their own loss, and schedules that return something else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.engine.build import initialize
from colonnade.engine.schedule.loss import _loss_of, call_criterion, split_loss
from colonnade.engine.schedule.schedules import BaseSchedule, NonPipelineSchedule
from colonnade.errors import ScheduleError
from tests.engine.test_engine import world_of_one

SCHEDULES = [{}, {"schedule": {"type": "GPipe", "num_microbatches": 2}}]
BATCH = {"input_ids": torch.arange(12).view(4, 3) % 5, "labels": torch.arange(4) % 2}


class Model(nn.Module):
    """Tokens to two classes. `gives` says in which form it returns a loss of its own; without it, logits."""

    def __init__(self, gives: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.gives = nn.Embedding(5, 4), nn.Linear(4, 2), gives

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.embedding(input_ids).mean(1))
        if self.gives is None:
            assert labels is None
            return logits
        assert labels is not None
        return self.gives(F.cross_entropy(logits, labels), logits)


class Strict(Model):
    """Cannot be called with labels."""

    def forward(self, input_ids: Tensor) -> Any:  # type: ignore[override]
        return super().forward(input_ids)


class NeedsLabels(Model):
    """Cannot be called without labels, and hands them on."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        return super().forward(input_ids), labels


def gradient(model: Model, criterion: Any, **config: Any) -> tuple[Tensor, Any, Tensor]:
    """(gradient, label, loss) of one step."""
    with world_of_one(**config) as gpc:
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), criterion, context=gpc)
        *_, before = engine.execute_schedule(iter([dict(BATCH)]), forward_only=True)
        weight = model.head.weight.detach().clone()
        _, label, loss = engine.execute_schedule(iter([dict(BATCH)]))
        assert loss is not None
        torch.testing.assert_close(before, loss)
        engine.step()
        engine.close()
        return weight - model.head.weight.detach(), label, loss


def truth() -> tuple[Tensor, Tensor]:
    model = Model()
    loss = F.cross_entropy(model(BATCH["input_ids"]), BATCH["labels"])
    loss.backward()
    assert model.head.weight.grad is not None
    return model.head.weight.grad, loss.detach()


@pytest.mark.parametrize("config", SCHEDULES, ids=["whole", "pipeline"])
@pytest.mark.parametrize(
    ("model", "criterion"),
    [
        (Strict, nn.CrossEntropyLoss()),
        (Model, F.cross_entropy),
        (Model, lambda logits, labels: F.cross_entropy(logits, labels)),
        (NeedsLabels, F.cross_entropy),
    ],
)
def test_the_labels_of_a_dict_go_to_a_criterion_that_takes_them(model, criterion, config):
    found, label, loss = gradient(model(), criterion, **config)
    expected, expected_loss = truth()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(loss, expected_loss, check_dtype=False)
    assert model is NeedsLabels or torch.equal(label, BATCH["labels"])


@pytest.mark.parametrize("config", SCHEDULES, ids=["whole", "pipeline"])
@pytest.mark.parametrize(
    ("gives", "criterion"),
    [
        (lambda loss, logits: loss, None),
        (lambda loss, logits: {"loss": loss, "logits": logits}, None),
        (lambda loss, logits: SimpleNamespace(loss=loss, logits=logits), None),
        (lambda loss, logits: (loss, logits), None),
        (lambda loss, logits: {"loss": (loss * len(logits), len(logits))}, None),
        (lambda loss, logits: (loss * len(logits), len(logits)), None),
        (lambda loss, logits: SimpleNamespace(loss=loss), lambda output: output.loss),
    ],
)
def test_a_model_may_return_its_own_loss(gives, criterion, config):
    found, _, loss = gradient(Model(gives), criterion, **config)
    expected, expected_loss = truth()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(loss, expected_loss, check_dtype=False)


@pytest.mark.parametrize(
    ("criterion", "batch", "told"),
    [
        (None, BATCH["input_ids"], r"the loss is unknown, because .* float32\[4, 2\].*Pass criterion= to initialize"),
        (F.cross_entropy, {"input_ids": BATCH["input_ids"]}, r"cross_entropy takes .*no label.*a dict with 'labels'"),
        (nn.CrossEntropyLoss(), BATCH["input_ids"], r"CrossEntropyLoss takes .*no label.*data_process_func"),
    ],
)
def test_a_loss_that_cannot_be_had_is_said(criterion, batch, told):
    with world_of_one() as gpc:
        model = Strict()
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), criterion, context=gpc)
        with pytest.raises(ScheduleError, match=told):
            engine.execute_schedule(iter([batch]))


class Returns(BaseSchedule):
    """Returns whatever it is told to."""

    result: Any = None

    def forward_back_step(self, engine, data_iter, forward_only=False, return_loss=True, return_output_label=True):
        data, label = self.load_batch(data_iter)
        loss = engine.criterion(engine(data), label)
        engine.backward(loss)
        return self.result if self.result != "loss" else loss


@pytest.mark.parametrize(("result", "told"), [(None, "None"), ("loss", r"float32\[\]"), ((1, 2), r"\(1, 2\)")])
def test_a_schedule_that_does_not_return_output_label_and_loss_is_refused(result, told):
    with world_of_one() as gpc:
        model = Model()
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, context=gpc)
        engine.schedule = Returns()
        engine.schedule.result = result
        with pytest.raises(ScheduleError, match=rf"Returns.forward_back_step\(\) returned {told}\. Return"):
            engine.execute_schedule(iter([(BATCH["input_ids"], BATCH["labels"])]))


@pytest.mark.parametrize("config", SCHEDULES, ids=["whole", "pipeline"])
@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("with_loss", [False, True])
@pytest.mark.parametrize("with_output", [False, True])
def test_what_is_not_asked_for_is_none(with_output, with_loss, forward_only, config):
    with world_of_one(**config) as gpc:
        model = Strict()
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), F.cross_entropy, context=gpc)
        asked = {"forward_only": forward_only, "return_loss": with_loss, "return_output_label": with_output}
        output, label, loss = engine.execute_schedule(iter([dict(BATCH)]), **asked)
        assert [value is not None for value in (output, label, loss)] == [with_output, with_output, with_loss]
        assert (model.head.weight.grad is None) is forward_only
        engine.close()


class Bare:
    """What the schedule needs of an engine that returns what it is given."""

    def __init__(self, criterion: Any = None) -> None:
        self.criterion = criterion
        self.went_back: list[Any] = []

    def __call__(self, *args: Any, **named: Any) -> Any:
        return named or args[0]

    def backward(self, loss: Any) -> None:
        self.went_back.append(loss)

    def note_loss(self, count: Any, *, trains: bool) -> None:
        assert not trains
        self.loss_count = count


def test_the_label_is_that_of_the_batch_or_the_labels_that_the_model_takes():
    schedule, loss = NonPipelineSchedule(), torch.tensor(2.0)
    whole = {"loss": loss, "labels": "in it"}
    for batch, expected in ((whole, "in it"), ((whole, "beside it"), "beside it"), ((loss, None), None)):
        engine = Bare()
        output, label, mean = schedule.forward_back_step(engine, iter([batch]))
        assert (label, mean, engine.went_back) == (expected, loss, [loss])
        assert output is not None
    with_criterion = Bare(lambda output: output["loss"])
    assert schedule.forward_back_step(with_criterion, iter([whole]))[1] is None


def test_an_evaluation_knows_what_its_loss_is_a_mean_over():
    logits, labels = torch.eye(3), torch.tensor([0, -100, 2])
    engine = Bare(F.cross_entropy)
    NonPipelineSchedule().forward_back_step(engine, iter([(logits, labels)]), forward_only=True)
    assert engine.loss_count == 2
    with torch.no_grad():
        assert split_loss(call_criterion(F.cross_entropy, logits, labels))[1] == 2
        assert split_loss(call_criterion(F.cross_entropy, logits.clone().requires_grad_(), labels))[1] == 2
    assert not logits.requires_grad
    with torch.inference_mode():
        assert call_criterion(F.cross_entropy, logits * 1, labels).item() == F.cross_entropy(logits, labels).item()


def given(*args: Any, **named: Any) -> Any:
    return args, named


@pytest.mark.parametrize(
    ("output", "label", "expected"),
    [
        (1, 2, ((1, 2), {})),
        ((1, 2), 3, ((1, 2, 3), {})),
        ([1], [2, 3], ((1, 2, 3), {})),
        ({"a": 1}, [2, 3], (({"a": 1}, [2, 3]), {})),
        ({"a": 1}, {"b": 2}, ((), {"a": 1, "b": 2})),
        (1, {"b": 2}, ((1,), {"b": 2})),
        ((1, 2), {"b": 2}, ((1, 2), {"b": 2})),
        ({"a": 1}, None, (({"a": 1},), {})),
    ],
)
def test_how_a_criterion_is_called(output, label, expected):
    assert _loss_of(given, output, label) == expected


def test_an_error_inside_a_criterion_stays_what_it_is():
    def wrong(output: Any) -> Any:
        raise TypeError("inside")

    with pytest.raises(TypeError, match="inside"):
        _loss_of(wrong, 1, None)
    with pytest.raises(ScheduleError, match=r"<lambda> takes 2 arguments, but the batch has no label"):
        _loss_of(lambda output, label: None, 1, None)
