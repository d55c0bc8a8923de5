"""What an optimizer does, found out by trying: two steps of a twin of it on small matrices, on the host.

`two_steps` shows whether an optimizer steps on parts of a matrix as on the whole (ZeRO, stage 3 and split tensors need that),
`state_dtypes` what it will keep of each element. The user's optimizer, its state and its hooks are left alone.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from colonnade.parallel.dtensor import local_part


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
    trial = twin_of(optimizer, [parameters for _ in optimizer.param_groups])
    # Lists and dicts that it changes in place must not be the user's.
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
    # Some optimizers make their state when they are built: the trial gets a sample of it, of the new shapes.
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


def twin_of(optimizer: Optimizer, parameters: Sequence[Sequence[Tensor]]) -> Optimizer:
    """A second object of the same class with the same attributes, over other tensors, without state."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler puts there a method that steps the original
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": list(tensors)} for group, tensors in zip(optimizer.param_groups, parameters, strict=True)
    ]
    return twin
