"""Another forward pass for one module: in copies too, and with no cycle."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from colonnade.parallel.forward import ModelHook, override_forward, restore_forward


def doubled(self: nn.Module, before: Any, *args: Any, **kwargs: Any) -> Any:
    return 2 * before(self, *args, **kwargs)


def of_class(layer: nn.Module) -> None:
    """As it is."""


def bound(layer: nn.Module) -> None:
    layer.forward = MethodType(lambda self, x: x @ self.weight.T + self.bias, layer)  # type: ignore[assignment]


@pytest.mark.parametrize("given", [of_class, bound])
def test_a_copy_computes_with_its_own_weights(given: Any) -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    expected = layer(x)
    given(layer)
    override_forward(layer, doubled)
    override_forward(layer, doubled)
    copied = copy.deepcopy(layer)
    nn.init.zeros_(copied.weight)
    torch.testing.assert_close(layer(x), 4 * expected)
    torch.testing.assert_close(copied(x), 4 * layer.bias.expand(4, 2))
    assert isinstance(layer, nn.Linear)


@pytest.mark.parametrize("given", [of_class, bound])
def test_what_was_there_comes_back(given: Any) -> None:
    layer, x = nn.Linear(3, 2), torch.ones(2, 3)
    given(layer)
    attributes, expected = set(vars(layer)), layer(x)
    override_forward(layer, doubled, mark="double")
    restore_forward(layer, "another")
    torch.testing.assert_close(layer(x), 2 * expected)
    restore_forward(layer, "double")
    assert (type(layer), set(vars(layer))) == (nn.Linear, attributes)
    torch.testing.assert_close(layer(x), expected)
    restore_forward(layer, "")
    assert type(layer) is nn.Linear


def test_modules_of_one_class_may_stay_of_one_class() -> None:
    layers = [nn.Linear(3, 2) for _ in range(3)]
    layers[2].forward = lambda x: x + 1  # type: ignore[assignment]
    for layer in layers:
        override_forward(layer, doubled, share_class=True)
    assert type(layers[0]) is type(layers[1]) is not type(layers[2])
    assert torch.equal(layers[2](torch.ones(2)), torch.full((2,), 4.0))


def test_a_function_on_the_instance_stays_what_it_was() -> None:
    layer = nn.Linear(3, 2)
    layer.forward = lambda x: x + 1  # type: ignore[assignment]
    override_forward(layer, doubled)
    assert torch.equal(layer(torch.ones(2)), torch.full((2,), 4.0))
    override_forward(layer, doubled, mark="double")
    restore_forward(layer, "double")
    assert torch.equal(layer(torch.ones(2)), torch.full((2,), 4.0))


def test_weights_go_with_the_module() -> None:
    gc.collect()
    gc.disable()
    try:
        layer = nn.Linear(3, 2)
        override_forward(layer, doubled)
        weight = weakref.ref(layer.weight)
        del layer
        assert weight() is None
    finally:
        gc.enable()


# -- hooks ------------------------------------------------------------------------------------------------
# A hook of ours belongs to one model: copies and pickles of the model do without it.


def test_a_hook_acts_on_its_own_model_alone() -> None:
    seen: list[int] = []
    layer = nn.Linear(2, 2)
    layer.register_forward_pre_hook(ModelHook(lambda module, args: seen.append(len(args))))
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for other in copies:
        other(torch.ones(2))
    assert seen == []
    layer(torch.ones(2))
    assert seen == [1]
