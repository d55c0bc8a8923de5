"""Give one module another forward pass."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node, Tracer
from torch.utils._pytree import tree_flatten, tree_map

from colonnade.errors import ScheduleError


def override_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let `forward(module, before, *args, **kwargs)` run for the module; `before(module, ...)` is its forward pass so far.

    By a class of its own, not by a method on the instance: that would belong to this module in a copy of it too, and be
    a cycle that keeps the weights in memory until Python looks for cycles.
    """
    kind: Any = type(module)
    before = _own_forward(module, vars(module).pop("forward", None))

    @functools.wraps(kind.forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, before, *args, **kwargs)

    module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": run})


def _own_forward(module: nn.Module, given: Any) -> Callable[..., Any]:
    """As a function of the module: that of its class, or what someone has put on the instance."""
    if given is None:
        return type(module).forward
    if getattr(given, "__self__", None) is module:
        return given.__func__
    return lambda self, *args, **kwargs: given(*args, **kwargs)


# --------------------------------------------------------------------------------------------------
# Hooks of ours on a user's model.
# --------------------------------------------------------------------------------------------------


class ModelHook:
    """A hook that belongs to this model alone: a copy of the model, or one that was pickled, does without it."""

    def __init__(self, act: Callable[..., None] | None = None) -> None:
        self._act = act

    def __call__(self, *args: Any) -> None:
        if self._act is not None:
            self._act(*args)

    def __reduce__(self) -> tuple[type[ModelHook], tuple[()]]:
        return ModelHook, ()


# --------------------------------------------------------------------------------------------------
# Whether a model's forward pass is nothing but its layers, one after another: only then may `split` take it apart.
#
# What forward does between two layers (a scale, an addition, a dropout) would be in no stage, and be lost without a word.
# --------------------------------------------------------------------------------------------------


Layers = Sequence[tuple[str, nn.Module]]
"""Layers in the order in which they are called, with their names in the model."""


BETWEEN = "Put what its forward() does between the layers into one of them."


def compare_with_stages(
    model: nn.Module, stages: nn.Module, run: Callable[[nn.Module], Any], advice: str = BETWEEN
) -> None:
    """Refuse stages that give another result than the model, from the same random state, in the mode it is in.

    Random state and buffers stay as they were.
    """
    what = f"the layers of {type(model).__name__}, one after another, give another result than its forward pass"
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = sorted({parameter.device.index for parameter in model.parameters() if parameter.is_cuda})
    results = []
    for module in (model, stages):
        try:
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                results.append(run(module))
        except Exception as error:
            if module is model:
                raise
            raise ScheduleError(
                f"{what}: they fail ({type(error).__name__}: {error}). {advice}", code="C050"
            ) from error
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
    (ours, form), (theirs, other) = (tree_flatten(result) for result in results)
    try:
        if form != other:
            raise AssertionError(f"{form} and {other}")
        for one, two in zip(ours, theirs, strict=True):
            torch.testing.assert_close(two, one, equal_nan=True)
    except AssertionError as error:
        raise ScheduleError(f"{what}. {advice}\n{error}", code="C050") from error


def in_modes(model: nn.Module, check: Callable[[], None]) -> None:
    """`check` the model as it is, and as one to be trained: its own forward() may do more then. Its layers stay as they are."""
    before = model.training
    try:
        for training in {before, True}:
            model.training = training
            check()
    finally:
        model.training = before


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Inside, they and all that they hold are in evaluation mode; then each as before."""
    modes = [(each, each.training) for module in modules for each in module.modules()]
    try:
        for each, _ in modes:
            each.training = False
        yield
    finally:
        for each, training in modes:
            each.training = training


def cloned(sample: Any) -> Any:
    """The same values in tensors of their own, which layers may change in place."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, sample)


def runs_in_order(model: nn.Module) -> bool:
    """Whether there is nothing but the layers by construction: a Sequential's own forward(), or none at all."""
    if is_altered(model):
        return False
    forward = type(model).forward
    return forward is nn.Module.forward or (forward is nn.Sequential.forward and not hasattr(model, "pipeline_layers"))


def require_chain(model: nn.Module, layers: Layers) -> None:
    """Refuse a model that cannot be shown to call these layers one after another and nothing else, without running it."""
    altered = "it has hooks, or a forward() of its own instance, which no stage would have"
    why = altered if is_altered(model) else _between(model, layers)
    if why:
        raise ScheduleError(
            f"the forward pass of {type(model).__name__} cannot be shown to be its layers one after another: {why}. Put what "
            f"forward() does between the layers into one of them; or pass sample=, the data of a batch, on which split "
            f"and whole model are compared",
            code="C050",
        )


def is_altered(module: nn.Module) -> bool:
    """Whether someone has put hooks or a forward() on this one instance."""
    return has_hooks(module) or "forward" in vars(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether anything watches or changes its calls, or their backward passes."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


class _Tracer(Tracer):
    """Records a forward pass in which each layer is one call."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self._layers = {id(layer) for _, layer in layers}

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return id(module) in self._layers


def _between(model: nn.Module, layers: Layers) -> str:
    """What forward does beside calling the layers in this order; empty if nothing."""
    try:
        graph = _Tracer(layers).trace(model)
    except Exception as error:  # a forward pass that looks at values can be traced no further
        return f"it cannot be traced ({type(error).__name__}: {error})"
    value = next(node for node in graph.nodes if node.op == "output").args[0]
    for at in reversed(range(len(layers))):
        name, layer = layers[at]
        if (
            not isinstance(value, Node)
            or value.op != "call_module"
            or model.get_submodule(str(value.target)) is not layer
        ):
            after = f"before {layers[at + 1][0]!r}" if at + 1 < len(layers) else "as its result"
            return f"{after} it has {_named(value)}, not the result of {name!r}"
        if at:
            value = _source(value)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    direct = list(value.args) == inputs[: len(value.args)]
    by_name = all(key == node.target for key, node in value.kwargs.items() if isinstance(node, Node))
    return "" if direct and by_name else f"{layers[0][0]!r} does not get what the model gets"


def _source(call: Node) -> Any:
    """The one value that a layer is called with: alone, or a tuple's items by position, or a dict's by keyword."""
    if len(call.args) == 1 and not call.kwargs:
        (value,) = call.args
        return value
    given = [*enumerate(call.args), *call.kwargs.items()]
    found = {_whole_of(value, key) for key, value in given}
    return found.pop() if len(found) == 1 and not (call.args and call.kwargs) else None


def _whole_of(value: Any, key: object) -> Any:
    """What `value` is the item `key` of; None if it is no such item."""
    is_item = isinstance(value, Node) and value.target is operator.getitem and value.args[1] == key
    return value.args[0] if is_item else None


def _named(value: Any) -> str:
    if value is None:
        return "several values"
    return f"the input {value.name!r}" if isinstance(value, Node) and value.op == "placeholder" else repr(str(value))
