"""A divided step equals torch's step on gradients divided beforehand, and a dropped one changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from colonnade.optim.bucket_step import ScaledStep, scale_all
from tests.optim.watch import Operations

FUSED: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "adam": partial(Adam, lr=0.1, fused=True),
    "adamw": partial(AdamW, lr=0.1, fused=True),
    "sgd": partial(SGD, lr=0.1, fused=True),
    "sgd-momentum": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "adagrad": partial(Adagrad, lr=0.1, fused=True),
}
PLAIN: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "adam": partial(Adam, lr=0.1),
    "adamw-foreach": partial(AdamW, lr=0.1, foreach=True),
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
    "sgd-dampening": partial(SGD, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
    "rmsprop": partial(RMSprop, lr=0.1),
    "nadam": partial(NAdam, lr=0.1),
}
ALL = {**{f"fused {k}": v for k, v in FUSED.items()}, **{f"plain {k}": v for k, v in PLAIN.items()}}
KEEP, DROP = torch.tensor(0.0), torch.tensor(1.0)


def params(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    source = torch.Generator().manual_seed(2)
    return [torch.nn.Parameter(torch.randn(n, generator=source).to(dtype)) for n in (3, 40)]


def give_grads(tensors: list[Tensor], seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, generator=source).to(tensor.dtype)


def close(one: list[Tensor], other: list[Tensor], tolerance: float = 1e-6) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_a_parameter_that_has_no_slot_gets_the_first_divisor() -> None:
    ours = params()
    before = [param.detach().clone() for param in ours]
    for param in ours:
        param.grad = torch.ones_like(param)
    ScaledStep(SGD(ours, lr=1.0), {ours[1]: 1}).step(torch.tensor([2.0, 4.0]))
    close(ours, [before[0] - 0.5, before[1] - 0.25])
    ScaledStep(SGD(ours, lr=1.0), {ours[1]: 2}).step(torch.tensor([2.0]))  # one for all
    close(ours, [before[0] - 0.75, before[1] - 0.375])


@pytest.mark.parametrize("name", ALL)
def test_equals_a_step_on_divided_gradients(name: str) -> None:
    theirs, ours = params(), params()
    plain, scaled = ALL[name](theirs), ScaledStep(ALL[name](ours))
    for seed, divisor in enumerate((1.0, 3.0, 1.7)):
        give_grads(theirs, seed)
        give_grads(ours, seed)
        for param in theirs:
            assert param.grad is not None
            param.grad.div_(divisor)
        plain.step()
        scaled.step(torch.tensor([divisor], dtype=torch.float64), KEEP)
        close([p.grad for p in ours if p.grad is not None], [p.grad for p in theirs if p.grad is not None])
    close(ours, theirs)


@pytest.mark.parametrize("name", ALL)
def test_a_dropped_step_changes_nothing(name: str) -> None:
    theirs, ours = params(), params()
    plain, scaled = ALL[name](theirs), ScaledStep(ALL[name](ours))
    for seed, drop in enumerate((True, False, True, False)):
        give_grads(ours, seed)
        before = copy.deepcopy(ours)
        scaled.step(torch.tensor(2.0), DROP if drop else KEEP)
        if drop:
            assert all(torch.equal(one, other) for one, other in zip(before, ours, strict=True))
        else:
            give_grads(theirs, seed)
            for param in theirs:
                assert param.grad is not None
                param.grad.div_(2.0)
            plain.step()
    close(ours, theirs)


@pytest.mark.parametrize("name", FUSED)
def test_attributes_of_a_loss_scaler_are_joined_and_put_back(name: str) -> None:
    theirs, ours = params(), params()
    plain, optimizer = FUSED[name](theirs), FUSED[name](ours)
    scale, flag = torch.tensor(4.0), torch.tensor(0.0)
    optimizer.grad_scale, optimizer.found_inf = scale, flag  # type: ignore[attr-defined]
    give_grads(theirs, 0)
    give_grads(ours, 0)
    for param in theirs:
        assert param.grad is not None
        param.grad.div_(8.0)
    plain.step()
    ScaledStep(optimizer).step(torch.tensor(2.0), KEEP)
    close(ours, theirs)
    assert optimizer.grad_scale is scale  # type: ignore[attr-defined]
    assert optimizer.found_inf is flag  # type: ignore[attr-defined]


def test_attributes_are_gone_afterwards_also_after_an_error() -> None:
    ours = params()
    optimizer = AdamW(ours, fused=True)
    give_grads(ours, 0)
    ScaledStep(optimizer).step(torch.tensor(2.0), KEEP)
    assert not hasattr(optimizer, "grad_scale")
    hook = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ScaledStep(optimizer).step(torch.tensor(2.0), KEEP)
    hook.remove()
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("beside", [torch.float64, torch.float32])
def test_fp64_keeps_its_digits(beside: torch.dtype) -> None:
    theirs, ours = ([params(torch.float64)[0], params(beside)[1]] for _ in range(2))
    plain, scaled = SGD(theirs, lr=1.0, fused=True), ScaledStep(SGD(ours, lr=1.0, fused=True))
    give_grads(theirs, 0)
    give_grads(ours, 0)
    for param in theirs:
        assert param.grad is not None
        param.grad.div_(1.1)
    plain.step()
    scaled.step(torch.tensor([1.1], dtype=torch.float64), KEEP)
    close(ours[:1], theirs[:1], 1e-15)
    close(ours, theirs)


@pytest.mark.parametrize("name", ["fused adamw", "plain sgd"])
def test_one_divisor_per_slot(name: str) -> None:
    theirs, ours = params(), params()
    plain, scaled = ALL[name](theirs), ScaledStep(ALL[name](ours), {ours[1]: 2})
    give_grads(theirs, 0)
    give_grads(ours, 0)
    for param, divisor in zip(theirs, (2.0, 5.0), strict=True):
        assert param.grad is not None
        param.grad.div_(divisor)
    plain.step()
    scaled.step(torch.tensor([2.0, 3.0, 5.0]), KEEP)
    close(ours, theirs)


def test_who_decides_on_the_host() -> None:
    for name, make in FUSED.items():
        made = make(params())
        # Adagrad takes a scale in later versions of torch only.
        takes_scale = name != "adagrad" or getattr(made, "_step_supports_amp_scaling", False)
        assert ScaledStep(made).waits_for_device is not takes_scale
    assert all(ScaledStep(make(params())).waits_for_device for make in PLAIN.values())
    one, other = params()
    damped = SGD([{"params": [one]}, {"params": [other], "dampening": 0.5}], lr=0.1, momentum=0.9, fused=True)
    assert ScaledStep(damped).waits_for_device
    for make, found_inf, reads in ((FUSED["adamw"], KEEP, 0), (PLAIN["sgd"], None, 0), (PLAIN["sgd"], KEEP, 1)):
        ours = params()
        scaled = ScaledStep(make(ours))
        give_grads(ours, 0)
        with Operations() as watched:
            scaled.step(torch.tensor(2.0), found_inf)
        assert watched.host_reads == reads


class Own(Optimizer):
    """Looks like a fused one, and takes neither a scale nor a flag."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"fused": True})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param -= param.grad


def test_an_optimizer_that_takes_no_scale_steps_on_divided_gradients_and_is_dropped_by_the_host() -> None:
    tensors = params()
    give_grads(tensors, 1)
    before, grads = [t.detach().clone() for t in tensors], [t.grad.clone() for t in tensors]
    step = ScaledStep(Own(tensors))
    assert step.waits_for_device
    step.step(torch.tensor(4.0), DROP)
    close([t.detach() for t in tensors], before)
    step.step(torch.tensor(4.0), KEEP)
    close([t.detach() for t in tensors], [b - g / 4 for b, g in zip(before, grads, strict=True)])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_starts_as_zeros_where_it_is_wanted_and_there_is_a_gradient(momentum: float) -> None:
    one, other = params()
    one.grad = torch.ones_like(one)
    optimizer = SGD([one, other], lr=0.1, momentum=momentum, fused=True)
    ScaledStep(optimizer).step(torch.tensor(1.0), DROP)
    kept = optimizer.state[one].get("momentum_buffer")
    assert not optimizer.state[other]
    assert kept is None if not momentum else torch.equal(kept, torch.zeros_like(one))
    ScaledStep(optimizer).step(torch.tensor(1.0), DROP)
    assert optimizer.state[one].get("momentum_buffer") is kept


def test_one_group_that_is_not_fused_makes_the_whole_step_divided_beforehand() -> None:
    one, other = params()
    optimizer = SGD([{"params": [one]}, {"params": [other], "fused": False}], lr=1.0, fused=True)
    give_grads([one, other], 1)
    expected = [t.detach() - t.grad / 4 for t in (one, other)]
    ScaledStep(optimizer).step(torch.tensor(4.0), KEEP)
    close([one.detach(), other.detach()], expected)


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)], ids=str)
@pytest.mark.parametrize("divide", [False, True])
def test_every_kind_of_gradient_is_scaled(factor, divide):
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
    grads = [torch.full((3,), 6.0, dtype=dtype) for dtype in kinds]
    sparse = torch.sparse_coo_tensor([[0, 2]], [4.0, 8.0], (3,))
    scale_all([*grads, sparse], factor, divide)
    by = 2.0 if divide else 0.5
    for grad, dtype in zip(grads, kinds, strict=True):
        assert torch.equal(grad, torch.full((3,), 6.0 * by, dtype=dtype))
    assert sparse.to_dense().tolist() == [4.0 * by, 0.0, 8.0 * by]


def test_a_factor_is_not_rounded_before_it_is_used():
    grads = [torch.ones(1, dtype=torch.float64), torch.ones(1)]
    scale_all(grads, torch.tensor(1 / 3, dtype=torch.float64))
    assert grads[0].item() == 1 / 3
    assert grads[1].item() == torch.tensor(1 / 3).item()
