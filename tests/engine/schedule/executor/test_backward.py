"""The split backward gives, in its two parts, exactly what one backward pass gives, for graphs of every form."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from colonnade.engine.schedule.split_backward import StageInput, backward_input, run_backward


class Plain(nn.Module):
    """Layers one after another, with normalisation and a branch around."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (x + self.layers(x) * y,)


class SharedWeight(nn.Module):
    """One layer used twice, with another in between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.between = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (self.shared(torch.tanh(self.between(torch.tanh(self.shared(x))))) + y,)


class Derived(nn.Module):
    """A weight made of two parameters, and an output that no input leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.direction, self.length = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 1))
        self.free = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        weight = self.direction / self.direction.norm(dim=1, keepdim=True) * self.length
        return torch.relu(x @ weight.T) + y, self.free.sin(), self.free


class SeveralOutputs(nn.Module):
    """One node with several results, an input passed through, an output used inside as well."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(4, 8), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        left, right = self.wide(x).chunk(2, dim=1)
        middle = self.narrow(left * right)
        return middle, y, torch.sigmoid(middle) * left


class Hooked(nn.Module):
    """Hooks on tensors that change gradients on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        hidden = self.first(x)
        hidden.register_hook(lambda grad: grad * 3)
        out = self.second(hidden)
        out.register_hook(lambda grad: grad * 5)
        return (out * y,)


class InPlace(nn.Module):
    """Begins in place, as a stage that starts with an activation does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (self.linear(torch.relu_(x)).add_(y),)


class UnusedInput(nn.Module):
    """Leaves an input and a parameter unused."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (self.used(x),)


class Checkpointed(Plain):
    """Recomputes its activations in the backward pass."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (checkpoint(self.layers, x, use_reentrant=False) * y,)


MODULES: list[Callable[[], nn.Module]] = [
    Plain,
    SharedWeight,
    Derived,
    SeveralOutputs,
    Hooked,
    InPlace,
    UnusedInput,
    Checkpointed,
]


def inputs_of(module: nn.Module) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(3)
    return module.double(), [torch.randn(3, 4, dtype=torch.float64) for _ in range(2)]


def entered(inputs: list[Tensor]) -> tuple[list[StageInput], list[Tensor]]:
    copies = [tensor.clone() for tensor in inputs]
    return [StageInput(tensor) for tensor in copies], copies


def grads_for(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(output.shape, generator=generator, dtype=output.dtype) for output in outputs]


def truth(module: nn.Module, inputs: list[Tensor]) -> tuple[list[Tensor | None], dict[str, Tensor | None]]:
    """Gradients of one plain backward pass over leaves (used through a copy, which an in-place layer may change)."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    outputs = module(*(leaf.clone() for leaf in leaves))
    torch.autograd.backward(outputs, grads_for(outputs))
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    return [leaf.grad for leaf in leaves], found


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("make", MODULES)
def test_in_one_part(make: Callable[[], nn.Module]) -> None:
    module, inputs = inputs_of(make())
    expected_inputs, expected = truth(module, inputs)
    entrances, tensors = entered(inputs)
    outputs = module(*tensors)
    run_backward(outputs, grads_for(outputs), inputs=None, last=True)
    assert_same([entrance.grad for entrance in entrances], expected_inputs)
    assert_same({name: parameter.grad for name, parameter in module.named_parameters()}, expected)


@pytest.mark.parametrize("make", MODULES)
def test_in_two_parts(make: Callable[[], nn.Module]) -> None:
    module, inputs = inputs_of(make())
    expected_inputs, expected = truth(module, inputs)
    entrances, tensors = entered(inputs)
    outputs = module(*tensors)
    found, work = backward_input(outputs, grads_for(outputs), entrances)
    assert_same(found, expected_inputs)
    assert all(parameter.grad is None for parameter in module.parameters()), "the input part touches no parameter"
    work.run(run_backward, last=True)
    assert_same({name: parameter.grad for name, parameter in module.named_parameters()}, expected)


@pytest.mark.parametrize("make", MODULES)
def test_weight_parts_accumulate_and_may_come_late(make: Callable[[], nn.Module]) -> None:
    module, inputs = inputs_of(make())
    _, expected = truth(module, inputs)
    works = []
    for _ in range(3):
        entrances, tensors = entered(inputs)
        outputs = module(*tensors)
        works.append(backward_input(outputs, grads_for(outputs), entrances)[1])
    for work in works:
        work.run(run_backward, last=False)
    tripled = {name: None if grad is None else 3 * grad for name, grad in expected.items()}
    assert_same({name: parameter.grad for name, parameter in module.named_parameters()}, tripled)


@pytest.mark.parametrize("make", MODULES)
def test_hooks_on_parameters_fire_once_per_backward_when_the_gradient_is_there(make: Callable[[], nn.Module]) -> None:
    module, inputs = inputs_of(make())
    _, expected = truth(module, inputs)
    seen: dict[str, Tensor | None] = {}
    for name, parameter in module.named_parameters():

        def hook(parameter: Tensor, name: str = name) -> None:
            assert name not in seen
            assert parameter.grad is not None
            seen[name] = parameter.grad.clone()

        parameter.register_post_accumulate_grad_hook(hook)
    entrances, tensors = entered(inputs)
    outputs = module(*tensors)
    _, work = backward_input(outputs, grads_for(outputs), entrances)
    assert not seen
    work.run(run_backward, last=True)
    assert_same(seen, {name: grad for name, grad in expected.items() if grad is not None})


def test_the_input_part_leaves_the_weights_uncomputed() -> None:
    """The point of the split: matrix products for weight gradients run in the second part alone."""
    from torch.utils.flop_counter import FlopCounterMode

    layer = nn.Linear(64, 64, bias=False)
    (entrance,), (tensor,) = entered([torch.randn(64, 64)])
    outputs = (layer(tensor),)
    one_product = 2 * 64**3
    with FlopCounterMode(display=False) as first:
        _, work = backward_input(outputs, grads_for(outputs), [entrance])
    with FlopCounterMode(display=False) as second:
        work.run(run_backward, last=True)
    assert (first.get_total_flops(), second.get_total_flops()) == (one_product, one_product)


def test_what_cannot_run_in_part_raises_and_can_still_run_whole() -> None:
    module, inputs = inputs_of(Plain())
    expected_inputs, _ = truth(module, inputs)
    entrances, (x, y) = entered(inputs)
    outputs = (x + checkpoint(module.layers, x, use_reentrant=True) * y,)
    with pytest.raises(RuntimeError, match="use_reentrant"):
        backward_input(outputs, grads_for(outputs), entrances)
    run_backward(outputs, grads_for(outputs), inputs=None, last=True)
    assert_same([entrance.grad for entrance in entrances], expected_inputs)


@pytest.mark.parametrize("last", [True, False])
def test_only_the_last_of_several_groups_is_told_that_it_is_the_last(last: bool) -> None:
    module, inputs = inputs_of(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]))
    entrances, (x, y) = entered(inputs)
    outputs = (module[2](torch.tanh(module[1](torch.tanh(module[0](x))))) + y,)
    _, work = backward_input(outputs, grads_for(outputs), entrances)
    told: list[bool] = []

    def watched(*args: Any, last: bool, **options: Any) -> None:
        told.append(last)
        run_backward(*args, last=last, **options)

    work.run(watched, last=last)
    assert told == [False, False, last]
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_an_output_that_is_a_parameter_gets_its_gradient_and_no_hook_stays_behind() -> None:
    linear, free = nn.Linear(4, 4).double(), nn.Parameter(torch.ones(3, dtype=torch.float64))
    (entrance,), (x,) = entered([torch.randn(3, 4, dtype=torch.float64)])
    outputs = (linear(x), free)
    grads = grads_for(outputs)
    _, work = backward_input(outputs, grads, [entrance])
    work.run(run_backward, last=True)
    assert_same(free.grad, grads[1])
    kept = weakref.ref(work)
    del work
    assert kept() is None  # though the graph is still there
    assert outputs[0].grad_fn is not None
