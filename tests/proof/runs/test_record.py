"""What a recorder notes of a model in one process."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from colonnade.proof.random_numbers import RecordedDraws
from colonnade.proof.record import StepRecorder, Tracked


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(checkpoint(lambda value: torch.tanh(self.inner(value)), x, use_reentrant=False))


def _recorder(model: nn.Module) -> StepRecorder:
    return StepRecorder(
        model, [Tracked(name, (name,), tensor, tuple(tensor.shape)) for name, tensor in model.named_parameters()], 0
    )


def test_gradients_of_passes_add_up_to_the_total_and_hooks_go():
    model = _Model()
    recorder = _recorder(model)
    for _ in range(2):
        loss = model(torch.randn(5, 3)).square().mean()
        recorder.note_loss((loss.item(), None))
        loss.backward()
    recorder.note_gradients()
    recorder.note_step(norm=1.0)
    recorder.close()
    (step,) = recorder.record.steps
    assert len(step.losses) == 2
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(step.raw[name][0] + step.raw[name][1], parameter.grad)
        assert torch.equal(step.total[name][0].value, parameter.grad)
    assert not any(module._forward_hooks for module in model.modules())
    model(torch.randn(5, 3)).sum().backward()
    assert recorder.passes() == []


def test_activations_are_those_of_the_first_pass_and_what_is_computed_again_is_told_apart():
    model = _Model()
    recorder = _recorder(model)
    x = torch.randn(5, 3)
    recorder.note_loss(None)
    model(x).sum().backward()
    recorder.note_loss(None)
    model(x + 1).sum().backward()
    recorder.note_step()
    step = recorder.record.steps[0]
    torch.testing.assert_close(step.activations["inner"], model.inner(x))
    torch.testing.assert_close(step.recomputed["inner"], model.inner(x))
    assert "outer" in step.activations
    assert "outer" not in step.recomputed


def test_a_copy_of_the_model_takes_nothing_of_the_recorder_along_and_is_not_seen():
    model = _Model()
    recorder = _recorder(model)
    recorder.left = (each for each in ())  # type: ignore[attr-defined]  # cannot be copied, as a recorder's surroundings
    average = copy.deepcopy(model)
    x = torch.randn(5, 3)
    average(x + 1)
    assert recorder._step.activations == {}
    model(x)
    torch.testing.assert_close(recorder._step.activations["inner"], model.inner(x))


def test_a_model_that_is_watched_can_be_pickled_and_what_is_read_back_is_not_seen():
    """As `torch.save(model)` does in a script."""
    model, noting = _Model(), RecordedDraws()
    recorder = _recorder(model)
    with noting.watching(model):
        again = pickle.loads(pickle.dumps(model))
    x = torch.randn(5, 3)
    again(x)
    assert recorder._step.activations == {}
    torch.testing.assert_close(again(x), model(x))
    assert "inner" in recorder._step.activations
