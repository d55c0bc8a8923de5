"""The user's optimizer over parts: the same class and options, on what this rank owns instead of whole parameters."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from colonnade.errors import GradientError
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.flat import flattened

_OWN_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


@dataclass(frozen=True, eq=False)
class Part:
    """Elements [start, stop) of a parameter's local tensor, in memory order: `value` is what the optimizer steps on."""

    parameter: Tensor
    group: int
    start: int
    stop: int
    value: Tensor

    @property
    def local(self) -> Tensor:
        """All elements of the parameter that this rank's model holds."""
        return local_part(self.parameter).detach()


def optimizer_of_parts(optimizer: Optimizer, parts: Sequence[Part]) -> Optimizer:
    """An optimizer like this one over `parts`, which takes over its state; the original's is given up.

    Step hooks are shared with the original, hooks of state dictionaries are not: they are for whole parameters.
    """
    groups = range(len(optimizer.param_groups))
    inner = _twin(optimizer, [[part.value for part in parts if part.group == at] for at in groups])
    for name in _OWN_HOOKS:
        setattr(inner, name, OrderedDict())
    for part in parts:
        held = optimizer.state.get(part.parameter)
        if held:
            inner.state[part.value] = {name: cut(value, part, name) for name, value in held.items()}
    optimizer.state.clear()
    return inner


def copy_options(source: Optimizer, target: Optimizer) -> None:
    """Give the groups of one optimizer the options of the other's (a scheduler, or a step, may have changed them)."""
    for theirs, mine in zip(source.param_groups, target.param_groups, strict=True):
        for key, value in theirs.items():
            if key != "params":
                mine[key] = value


def cut(value: Any, part: Part, name: str) -> Any:
    """What a part keeps of something that was kept for its whole parameter."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    whole, held = part.local, local_part(value).detach()
    if name != "step" and held.shape == whole.shape:
        if held.stride() != whole.stride():
            held = torch.empty_like(whole, dtype=held.dtype).copy_(held)
        return flattened(held)[part.start : part.stop].to(part.value.device, copy=True)
    return held.clone()


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose update of an element depends on its neighbours: a slice would step otherwise.

    Found out by trying, for each kind of parameter group: two steps on a small matrix, whole and in two halves.
    """
    for first, *_ in kinds_of_groups(optimizer):
        _check_group(optimizer, first)


def kinds_of_groups(optimizer: Optimizer) -> list[list[int]]:
    """The numbers of its groups with parameters, those together that differ only in how large an option is."""
    found: dict[str, list[int]] = {}
    for at, group in enumerate(optimizer.param_groups):
        options = {
            name: bool(value) if isinstance(value, (int, float)) else value
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        if group["params"]:
            found.setdefault(repr(sorted(options.items())), []).append(at)
    return list(found.values())


def _check_group(optimizer: Optimizer, at: int) -> None:
    name = type(optimizer).__name__
    try:
        whole, halves = two_steps(
            optimizer, at, (4, 6), lambda tensor: [half.clone() for half in tensor.view(-1).chunk(2)]
        )
    except Exception as error:
        raise GradientError(
            f"zero stages 1 and 2 shard element-wise optimizers, and {name} could not step on a slice: {error}. "
            f"Use AdamW, SGD or the like, or zero stage 3 or 0.",
            code="C070",
        ) from error
    if not torch.allclose(whole.view(-1), torch.cat(halves), rtol=1e-9, atol=1e-12):
        raise GradientError(
            f"zero stages 1 and 2 shard element-wise optimizers, and {name} is none: in group {at} it steps otherwise on half of "
            f"a matrix than on the whole. Use AdamW, SGD or the like, or turn zero off.",
            code="C070",
        )


def two_steps(
    optimizer: Optimizer, at: int, shape: tuple[int, ...], cut: Callable[[Tensor], list[Any]], device: str = "cpu"
) -> tuple[Tensor, list[Any]]:
    """A matrix, and what `cut` makes of it, each after two steps on the same gradients in group `at` of such an optimizer."""
    numbers = torch.Generator().manual_seed(0)
    whole, *grads = (
        torch.randn(shape, generator=numbers, dtype=torch.float64, device="cpu").to(device) for _ in range(3)
    )
    parts = cut(whole)
    trials = [_trial_of(optimizer, at, [whole]), _trial_of(optimizer, at, parts)]
    with torch.random.fork_rng(devices=[]):
        for grad in grads:
            whole.grad = grad
            for part, piece in zip(parts, cut(grad), strict=True):
                part.grad = piece
            for trial in trials:
                trial.step()
    return whole, parts


def state_dtypes(optimizer: Optimizer, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes of the state that it will keep of every element of a parameter; none where a trial fails."""
    parameter = torch.zeros(2, 2, dtype=dtype, device="cpu")
    parameter.grad = torch.ones_like(parameter)
    try:
        trial = _trial_of(optimizer, 0, [parameter])
        trial.step()
    except Exception:  # it says why at its first step
        return ()
    kept = [value for value in trial.state[parameter].values() if isinstance(value, Tensor)]
    return tuple(value.dtype for value in kept if value.shape == parameter.shape)


def _trial_of(optimizer: Optimizer, at: int, parameters: list[Tensor]) -> Optimizer:
    """The optimizer's group `at` alone, on small tensors of the host, without hooks."""
    trial = _twin(optimizer, [parameters for _ in optimizer.param_groups])
    # What it changes in place must not be the user's.
    own = {key: copy.copy(value) for key, value in trial.__dict__.items() if type(value) in (list, dict)}
    trial.__dict__.update({key: value for key, value in own.items() if key != "param_groups"})
    group = {key: value if key == "params" else copy.deepcopy(value) for key, value in trial.param_groups[at].items()}
    trial.param_groups = [group]
    for option in ("fused", "foreach", "capturable", "differentiable"):
        if option in group:
            group[option] = False
    for option, value in group.items():
        if isinstance(value, Tensor):
            group[option] = float(value)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(trial, name, OrderedDict())
    # Some make their state when they are built: a sample of it, of the new shapes.
    held = [(p, optimizer.state[p]) for p in optimizer.param_groups[at]["params"] if optimizer.state.get(p)]
    like, sample = next((one for one in held if local_part(one[0]).numel()), held[0] if held else (None, {}))
    for parameter in parameters:
        trial.state[parameter] = {key: _sample(value, like, parameter, key) for key, value in sample.items()}
    return trial


def _sample(value: Any, like: Any, parameter: Tensor, name: str) -> Any:
    if isinstance(value, Tensor) and name != "step" and value.shape == like.shape:
        own = local_part(value).flatten()  # a rank may hold none of it
        return torch.full_like(parameter, float(own[0]) if own.numel() else 0.0)
    return torch.zeros((), device="cpu") if name == "step" and isinstance(value, Tensor) else copy.deepcopy(value)


def _twin(optimizer: Optimizer, parameters: Sequence[Sequence[Tensor]]) -> Optimizer:
    """A second object of the same class with the same attributes, over other tensors, without state."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler puts there a method that steps the original
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": list(tensors)} for group, tensors in zip(optimizer.param_groups, parameters, strict=True)
    ]
    return twin
