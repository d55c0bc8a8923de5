"""The executor in one process: all stages here, against the whole model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from colonnade.engine.schedule.executor import Executor
from colonnade.engine.schedule.executor.executor import _first_sharing
from colonnade.engine.schedule.executor.micro_batch import cut_batch
from colonnade.engine.schedule.orders import make_table
from colonnade.errors import GradientError, ScheduleError

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
    ran = made.run(cut_batch(X, Y, 3), keep_outputs=True)
    torch.testing.assert_close(ran.loss, loss.detach())
    torch.testing.assert_close(torch.cat(ran.outputs), whole(X).detach())
    assert [len(output) for output in ran.outputs] == [3, 2, 2]
    expected = [F.mse_loss(whole(x), y).detach() for x, y in zip(X.split([3, 2, 2]), Y.split([3, 2, 2]), strict=True)]
    torch.testing.assert_close(torch.stack(ran.losses), torch.stack(expected))
    for found, truth in zip(nn.Sequential(*parts).parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, truth.grad)
    assert ran.count is None
    made.run(cut_batch(X, Y, 3), backward_scale=2.0)  # on top of what is there
    for found, truth in zip(nn.Sequential(*parts).parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, 3 * truth.grad)


def test_evaluation_makes_no_gradient_and_losses_and_outputs_only_where_asked():
    parts = stages()
    made = executor(parts)
    ran = made.run(cut_batch(X, Y, 3), forward_only=True)
    assert len(ran.losses) == 3
    assert ran.outputs == []
    without = made.run(cut_batch(X, Y, 3), forward_only=True, with_loss=False, keep_outputs=True)
    assert without.losses == []
    assert without.loss is None
    assert len(without.outputs) == 3
    assert all(parameter.grad is None for part in parts for parameter in part.parameters())


def test_sums_and_counts_make_the_mean_of_the_batch():
    parts = stages()
    made = executor(parts, loss_fn=lambda output, y: (F.mse_loss(output, y, reduction="sum"), y.numel()))
    ran = made.run(cut_batch(X, Y, 3), sum_scale=0.5)
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


@pytest.mark.parametrize(("backend", "device"), [("gloo", "cpu"), ("nccl", "meta")])
def test_a_loss_is_shared_where_the_backend_can_take_it(monkeypatch, backend, device):
    made = executor(stages())
    made.device = torch.device("meta")
    made.form.keep(False)
    lay: list[str] = []
    full = torch.full
    monkeypatch.setattr(
        torch, "full", lambda *args, **options: lay.append(str(options["device"])) or full(*args, **options)
    )
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    assert made.share_loss(torch.tensor(1.0))[0].device.type == "meta"
    assert lay == [device]


def test_each_chunk_is_told_once_that_its_gradients_are_complete():
    told = []

    def backward(tensors, grads, *, inputs, last):
        told.append(last)
        torch.autograd.backward(list(tensors), list(grads))

    executor(stages(), backward=backward).run(cut_batch(X, Y, 3))
    assert told.count(True) == 2
    assert len(told) == 6
    assert told[-1]


def test_what_cannot_run_is_refused():
    parts = stages()
    made = executor(parts)
    with pytest.raises(ScheduleError, match="for 3 micro-batches, but 2 were given"):
        made.run(cut_batch(X, Y, 2))
    with pytest.raises(ScheduleError, match="pass loss_fn"):
        executor(parts, loss_fn=None).run(cut_batch(X, Y, 3))
    executor(parts, loss_fn=None).run(cut_batch(X, None, 3), forward_only=True, with_loss=False)
    with pytest.raises(ScheduleError, match="a table for 2 ranks cannot run on a pipeline of 1"):
        Executor(parts, make_table("gpipe", 2, 2))
    with pytest.raises(ScheduleError, match="gives pipeline rank 0 the stages 0, but 2 stage module"):
        Executor(parts, make_table("gpipe", 1, 2))


def test_stages_that_share_a_parameter_are_known_by_the_first_of_them():
    a, b, c, d = (nn.Linear(2, 2, bias=False) for _ in range(4))
    c.weight = a.weight
    both = nn.ModuleList([b, c])
    assert _first_sharing({0: a, 2: b, 4: c, 6: d}) == {0: 0, 2: 2, 4: 0, 6: 6}
    assert _first_sharing({1: b, 3: a, 5: both, 7: d}) == {1: 1, 3: 1, 5: 1, 7: 7}


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
