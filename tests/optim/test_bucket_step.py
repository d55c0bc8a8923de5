"""Norm and step over buckets in one process: gradients that somebody has put elsewhere count as what they are."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.engine.gradient_handler import BaseGradientHandler
from colonnade.errors import GradientError
from colonnade.optim import bucket_step
from colonnade.optim.bucket_step import wants_flat
from colonnade.registry import GRADIENT_HANDLER
from colonnade.testing import run_world


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def changed(model: nn.Module, change: str) -> None:
    """What a handler may do to gradients that are summed already."""
    first, second, *_ = model.parameters()
    if change == "replaced":
        second.grad = torch.full_like(second, 5.0)
    elif change == "with holes":
        first.grad = torch.cat([first.grad, first.grad], 1)[:, :3]
    elif change == "taken away":
        first.grad = None
    elif change == "not finite":
        second.grad[1] = torch.nan


def stepped(config: dict[str, object], change: str) -> tuple[list[torch.Tensor], float, str | None, bool]:
    """Two steps, at the second of which gradients are changed. (parameters, norm, first bad name, was it flat)"""
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        model = built()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        engine = initialize(model, optimizer, context=gpc)[0]
        for step in range(2):
            engine.zero_grad()
            engine.backward(engine(torch.ones(5, 3, dtype=torch.float64)).square().sum())
            if step == 1:
                finish = engine._sync.finish
                engine._sync.finish = lambda *a, finish=finish, **k: (finish(*a, **k), changed(model, change))[0]
            engine.step()
        took = engine._stepper._step
        result = [p.detach().clone() for p in model.parameters()], engine.grad_norm.item(), took.first_nonfinite()
        was_flat = took.flat is not None
        assert bool(optimizer._optimizer_load_state_dict_post_hooks) is was_flat
        engine.close()
        assert not optimizer._optimizer_load_state_dict_post_hooks
        return *result, was_flat


@pytest.mark.parametrize("change", ["none", "replaced", "with holes", "taken away", "not finite"])
def test_the_flat_step_sees_the_gradients_that_the_optimizer_would_see(change):
    found, norm, bad, flat = stepped({"clip_grad_norm": 1.0, "flat_step": True}, change)
    expected, expected_norm, expected_bad, was_flat = stepped({"clip_grad_norm": 1.0, "flat_step": False}, change)
    assert flat
    assert not was_flat
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert norm == pytest.approx(expected_norm, rel=1e-12, nan_ok=True)
    assert bad == expected_bad == ("0.bias" if change == "not finite" else None)


def test_the_norm_counts_a_replaced_gradient_and_not_the_one_it_replaced():
    norms = {change: stepped({"clip_grad_norm": 1e9}, change)[1] for change in ("none", "replaced", "taken away")}
    assert norms["replaced"] ** 2 - norms["none"] ** 2 == pytest.approx(4 * 25 - _second_norm() ** 2, rel=1e-9)
    assert norms["taken away"] < norms["none"]


def _second_norm() -> float:
    """The norm of the gradient of 0.bias at the second step, in plain torch."""
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(5, 3, dtype=torch.float64)).square().sum().backward()
        norm = model[0].bias.grad.norm().item()
        optimizer.step()
    return norm


class SumsByHand(BaseGradientHandler):
    def handle_gradient(self) -> None:
        for parameter in self._model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _uneven_by_hand(dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients after each step, and weights at the end; rank 1 has no batch for the second of two steps."""
    GRADIENT_HANDLER.register_module(SumsByHand)
    config = {"clip_grad_norm": 0.01, "gradient_handler": ["SumsByHand"]}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        model = built().to(dtype)
        engine = initialize(model, torch.optim.AdamW(model.parameters(), lr=0.1), context=gpc)[0]
        grads: list[torch.Tensor] = []

        def keep() -> None:
            grads.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).clone())

        for x in engine.batches([torch.ones(5, 3, dtype=dtype)] * (2 - gpc.get_global_rank()), after_step=keep):
            engine.zero_grad()
            engine.backward(engine(x).square().sum())
            engine.step()
            keep()
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        engine.close()
        return grads, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rank_that_is_out_of_batches_steps_as_the_others_do(dtype):
    (grads, weights), (other_grads, other_weights) = run_world(2, _uneven_by_hand, dtype).values
    torch.testing.assert_close(other_grads, grads, rtol=0, atol=0)
    torch.testing.assert_close(other_weights, weights, rtol=0, atol=0)


def test_a_step_that_is_to_be_recorded_is_the_same_before_it_is(monkeypatch):
    asked: list[tuple[int, bool]] = []
    monkeypatch.setattr(bucket_step, "check_capturable", lambda owned, flat: asked.append((len(owned), flat)))
    with launch({"clip_grad_norm": 1.0}, context=ParallelContext(), verbose=False) as gpc:
        model, plain = built(), built()
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), context=gpc)[0]
        optimizer, step = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), engine._stepper._step
        assert not step.captured
        step.capture()
        assert step.captured
        step._is_flat = False
        step.capture()
        assert asked == [(4, True), (4, False)]
        step._is_flat = True
        for _ in range(2):  # a third one would be recorded
            engine.zero_grad()
            optimizer.zero_grad()
            engine.backward(engine(torch.ones(5, 3, dtype=torch.float64)).square().sum())
            plain(torch.ones(5, 3, dtype=torch.float64)).square().sum().backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            engine.step()
            optimizer.step()
        assert step.flat.graph is not None
        # A graph reads fp32 learning rates.
        torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=1e-7, atol=1e-8)
        engine.close()


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
@pytest.mark.parametrize("divisor", [None, 4.0])
def test_a_step_is_divided_or_dropped_or_neither(divisor, found_inf, flat):
    with launch({"flat_step": flat}, context=ParallelContext(), verbose=False) as gpc:
        model = built()
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.5), context=gpc)[0]
        before = [parameter.detach().clone() for parameter in model.parameters()]
        engine.backward(engine(torch.ones(5, 3, dtype=torch.float64)).square().sum())
        given = [
            None if value is None else torch.tensor(value).view(shape)
            for value, shape in ((divisor, (1,)), (found_inf, ()))
        ]
        moved = 0.0 if found_inf else 0.5 / (divisor or 1)
        expected = [old - moved * p.grad for old, p in zip(before, model.parameters(), strict=True)]
        engine._stepper.step = lambda outcome: engine._stepper._step.step_divided(*given)
        engine.step()
        torch.testing.assert_close(list(model.parameters()), expected)
        engine.close()


@pytest.mark.parametrize(
    ("flat", "optimizer", "drops"),
    [
        (True, torch.optim.SGD, True),
        (False, torch.optim.SGD, False),
        (False, partial(torch.optim.AdamW, fused=True), True),
        (False, torch.optim.RMSprop, False),
    ],
)
def test_who_can_drop_a_step_without_the_host(flat, optimizer, drops):
    with launch({"flat_step": flat}, context=ParallelContext(), verbose=False) as gpc:
        model = built()
        engine = initialize(model, optimizer(model.parameters(), lr=0.1), context=gpc)[0]
        assert engine._stepper._step.skips_on_device is drops
        engine.close()


@pytest.mark.parametrize(
    ("owned", "trained", "is_flat"), [(False, True, True), (True, True, False), (True, False, True)]
)
def test_a_gradient_in_no_bucket_is_stepped_on_by_the_optimizer_itself_if_it_is_there(owned, trained, is_flat):
    """That of an embedding, which is sparse."""
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2)).double()
        model[0].requires_grad_(trained)
        plain, tokens = copy.deepcopy(model), torch.tensor([0, 2, 2])
        ours, theirs = (torch.optim.SGD((one if owned else one[1]).parameters(), lr=0.1) for one in (model, plain))
        engine = initialize(model, ours, context=gpc)[0]
        for _ in range(2):
            engine.zero_grad()
            theirs.zero_grad()
            engine.backward(engine(tokens).square().sum())
            plain(tokens).square().sum().backward()
            engine.step()
            theirs.step()
        assert (engine._stepper._step.flat is not None) is is_flat
        torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))
        engine.close()


def test_a_parameter_that_came_after_initialize_is_refused_by_name_and_one_of_before_is_not():
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        model = built()
        first, *others = model.parameters()
        optimizer = torch.optim.SGD([first], lr=0.1)
        engine = initialize(model, optimizer, context=gpc)[0]
        later = nn.Linear(2, 2).double()
        model.append(later)
        for params, told in (
            (others, ""),
            (list(later.parameters()), r"3\.weight of shape \(2, 2\)"),
            ([nn.Parameter(torch.zeros(3))], r"a parameter of shape \(3,\)"),
        ):
            optimizer.add_param_group({"params": params})
            engine.zero_grad()
            engine.backward(engine(torch.ones(5, 3, dtype=torch.float64)).square().sum())
            with (
                pytest.raises(GradientError, match=f"^{told} was added to optimizer group 2") if told else nullcontext()
            ):
                engine.step()
            del optimizer.param_groups[2:]
        engine.close()


@pytest.mark.parametrize(
    ("make", "dtensors", "reason"),
    [
        (lambda own, other: torch.optim.SGD(own), 0, None),
        (lambda own, other: torch.optim.NAdam(own), 0, "not NAdam"),
        (lambda own, other: SimpleNamespace(param_groups=[]), 0, "not a torch optimizer"),
        (lambda own, other: torch.optim.SGD([*own, other]), 0, "not in the model"),
        (lambda own, other: torch.optim.SGD(own), 1, "has DTensor parameters"),
    ],
)
def test_who_is_stepped_flat(make, dtensors, reason, monkeypatch):
    own, other = [nn.Parameter(torch.zeros(1)) for _ in range(2)], nn.Parameter(torch.zeros(1))
    monkeypatch.setattr(bucket_step, "is_dtensor", lambda one: any(one is p for p in own[:dtensors]))
    optimizer = make(own, other)
    assert wants_flat(own, optimizer, False) is False
    assert wants_flat(own, optimizer, None) is (reason is None)
    if reason is None:
        assert wants_flat(own, optimizer, True) is True
        return
    with pytest.raises(GradientError, match=f"^this=True is not available here: .*{reason}"):
        wants_flat(own, optimizer, True, "this")
    with pytest.raises(GradientError, match=r"^flat_step=True is not available here"):
        wants_flat(own, optimizer, True)
