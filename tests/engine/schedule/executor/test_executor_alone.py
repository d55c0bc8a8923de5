"""The executor in one process: all stages here, against the whole model; and what is done where a stage cannot be split."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from colonnade.engine.schedule import executor as step_module
from colonnade.engine.schedule.actions import parse_table
from colonnade.engine.schedule.executor import Executor
from colonnade.engine.schedule.micro_batch import split_into_micro_batches
from colonnade.engine.schedule.orders import make_table
from colonnade.errors import GradientError
from tests.engine.schedule import models
from tests.engine.schedule.executor.test_executor import loss_of

X = torch.randn(7, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(7, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double(), nn.Linear(4, 2).double()]


def executor(chunks: list[nn.Module], micro_batches: int = 3, **options: object) -> Executor:
    table = make_table(
        "gpipe" if len(chunks) == 1 else "interleaved_1f1b", 1, micro_batches, len(chunks) if len(chunks) > 1 else None
    )
    return Executor(chunks, table, **{"loss_fn": F.mse_loss, **options})


@pytest.mark.parametrize("chunks", [1, 2])
def test_losses_gradients_and_outputs_are_those_of_the_whole_model(chunks):
    parts = stages()
    whole = copy.deepcopy(nn.Sequential(*parts))
    loss = F.mse_loss(whole(X), Y)
    loss.backward()
    made = executor(parts if chunks == 2 else [nn.Sequential(*parts)])
    assert made.has_first_stage
    assert made.has_last_stage
    ran = made.run(split_into_micro_batches(X, Y, 3), keep_outputs=True)
    torch.testing.assert_close(ran.loss, loss.detach())
    torch.testing.assert_close(torch.cat(ran.outputs), whole(X).detach())
    assert [len(output) for output in ran.outputs] == [3, 2, 2]
    expected = [F.mse_loss(whole(x), y).detach() for x, y in zip(X.split([3, 2, 2]), Y.split([3, 2, 2]), strict=True)]
    torch.testing.assert_close(torch.stack(ran.losses), torch.stack(expected))
    for found, truth in zip(nn.Sequential(*parts).parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, truth.grad)
    assert ran.count is None
    # On top of the gradients that are there; the loss is not scaled.
    again = made.run(split_into_micro_batches(X, Y, 3), backward_scale=torch.tensor(2.0))
    torch.testing.assert_close(again.loss, ran.loss)
    for found, truth in zip(nn.Sequential(*parts).parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, 3 * truth.grad)


def test_evaluation_makes_no_gradient_and_losses_and_outputs_only_where_asked():
    parts = stages()
    made = executor(parts)
    ran = made.run(split_into_micro_batches(X, Y, 3), forward_only=True)
    assert len(ran.losses) == 3
    assert ran.outputs == []
    made = executor(parts, loss_fn=None)  # not needed then
    without = made.run(split_into_micro_batches(X, Y, 3), forward_only=True, with_loss=False, keep_outputs=True)
    assert without.losses == []
    assert without.loss is None
    assert len(without.outputs) == 3
    assert not any(output.requires_grad for output in without.outputs)
    assert all(parameter.grad is None for part in parts for parameter in part.parameters())


def test_sums_and_counts_make_the_mean_of_the_batch():
    parts = stages()
    made = executor(parts, loss_fn=lambda output, y: (F.mse_loss(output, y, reduction="sum"), y.numel()))
    ran = made.run(split_into_micro_batches(X, Y, 3), sum_scale=0.5)
    whole = copy.deepcopy(nn.Sequential(*parts))
    whole.zero_grad()
    loss = F.mse_loss(whole(X), Y, reduction="sum")
    torch.testing.assert_close(ran.loss, loss.detach() / Y.numel())
    assert ran.count == Y.numel()
    (loss / 2).backward()
    for found, truth in zip(nn.Sequential(*parts).parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, truth.grad)
    mean, count = made.share_loss(ran.loss, ran.count)
    torch.testing.assert_close(mean, ran.loss)
    assert count == Y.numel()


def test_the_loss_of_the_last_stage_keeps_its_form_on_ranks_without_it():
    loss, count = torch.tensor(2.0), torch.tensor(3.0)
    for given in (None, count):
        made = executor(stages())
        assert made.form.counted is None
        mean, counted = made.share_loss(loss, given)
        assert (mean.item(), None if counted is None else counted.item()) == (2.0, None if given is None else 3.0)
        assert made.form.counted is (given is not None)
        with pytest.raises(GradientError, match="the loss was"):
            made.form.keep(given is None)


def test_losses_of_training_and_of_evaluation_may_have_two_forms():
    made = executor(stages())
    assert made.form is made._forms[True]
    made.share_loss(torch.tensor(2.0), torch.tensor(3.0))
    with pytest.raises(GradientError, match="the loss was"):
        made.run(split_into_micro_batches(X, Y, 3))
    ran = made.run(split_into_micro_batches(X, Y, 3), forward_only=True)
    assert (made.form, made.form.counted, ran.count) == (made._forms[False], False, None)


# -- what goes wrong, with links that write down ----------------------------------------------------------


# -- phases, and stages that cannot be split ---
class Clock:
    """Which phases were entered, one after another."""

    def __init__(self) -> None:
        self.told = ["before"]

    def enter(self, phase: str) -> str:
        self.told.append(phase)
        return self.told[-2]


def test_the_time_of_an_action_counts_in_its_phase():
    clock: Any = Clock()
    executor = Executor(
        models.build(models.Simple, 2), parse_table(["0F0 1F0 1I0 1W0 0B0"]), loss_fn=loss_of, waits=clock
    )
    executor.run(split_into_micro_batches(*models.batch_for(models.Simple, 2), 1))
    assert clock.told == ["before", "forward", "forward", "backward", "backward", "backward"]


def test_a_stage_that_cannot_be_split_is_tried_once(monkeypatch):
    said: list[str] = []
    tried: list[int] = []
    split = step_module.backward_input

    def watched(roots: Any, grads: Any, inputs: Any) -> Any:
        tried.append(1)
        return split(roots, grads, inputs)

    monkeypatch.setattr(step_module, "get_dist_logger", lambda: SimpleNamespace(warning=said.append))
    monkeypatch.setattr(step_module, "backward_input", watched)
    stages = models.build(models.Unsplittable, 2)
    executor = Executor(stages, parse_table(["0F0 1F0 1I0 0I0 0F1 1F1 1I1 0I1 0W0 1W0 0W1 1W1"]), loss_fn=loss_of)
    executor.run(split_into_micro_batches(*models.batch_for(models.Unsplittable, 4), 2))
    _, _, expected = models.truth(models.Unsplittable, 2, 4)
    found = {f"{at}.{name}": p.grad for at, stage in enumerate(stages) for name, p in stage.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert len(said) == len(tried) == 1
    assert executor.unsplittable == {1}


def test_a_stage_that_computes_again_is_not_split(monkeypatch):
    """Nor one of FSDP2; a stage with either is enough."""

    class Sharded(models.Simple):
        def _get_fsdp_state(self) -> None: ...

    stages: list[nn.Module] = [models.Simple(0, 2), nn.Sequential(models.Simple(1, 2), Sharded(1, 2))]
    executor = Executor(stages, parse_table(["0F0 1F0 1B0 0B0"]), loss_fn=loss_of)
    assert executor.unsplittable == {1}
    from colonnade.engine.schedule import executor as module

    monkeypatch.setattr(module, "recomputes", lambda stage: stage is stages[0])
    executor = Executor(stages, parse_table(["0F0 1F0 1B0 0B0"]), loss_fn=loss_of)
    assert executor.unsplittable == {0, 1}
