"""Properties of an optimizer, found by a trial: a twin of it takes steps on small matrices.

`run_trial_steps` shows whether an optimizer steps on shards of a matrix as on the full matrix, which ZeRO, stage 3 and tensor
parallelism need. `state_dtypes` shows which state it will keep per element. The user's optimizer, its state and its hooks are
left unchanged.
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


def groups_by_options(optimizer: Optimizer) -> list[list[int]]:
    """The indices of non-empty parameter groups, grouped by options; a number counts only as zero or non-zero."""
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


def run_trial_steps(
    optimizer: Optimizer, at: int, shape: tuple[int, ...], cut: Callable[[Tensor], list[Any]], device: str = "cpu"
) -> tuple[Tensor, list[Any]]:
    """Run two steps on a random matrix, and on its shards with the same gradients.

    Args:
        optimizer: The optimizer of which a twin is tried.
        at: The parameter group with the options to use.
        shape: The shape of the matrix.
        cut: Splits a matrix into shards.
        device: The device of the matrix.

    Returns:
        The matrix and its shards after the steps.
    """
    numbers = torch.Generator().manual_seed(0)
    full, *grads = (
        torch.randn(shape, generator=numbers, dtype=torch.float64, device="cpu").to(device) for _ in range(3)
    )
    shards = cut(full)
    trials = [_trial_of(optimizer, at, [full]), _trial_of(optimizer, at, shards)]
    with torch.random.fork_rng(devices=[]):
        for grad in grads:
            full.grad = grad
            for shard, piece in zip(shards, cut(grad), strict=True):
                shard.grad = piece
            for trial in trials:
                trial.step()
    return full, shards


def state_dtypes(optimizer: Optimizer, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes of the state that the optimizer will keep per element of a parameter; empty if the trial fails."""
    parameter = torch.zeros(2, 2, dtype=dtype, device="cpu")
    parameter.grad = torch.ones_like(parameter)
    try:
        trial = _trial_of(optimizer, 0, [parameter])
        trial.step()
    except Exception:  # the optimizer raises the same error at its first step
        return ()
    kept = [value for value in trial.state[parameter].values() if isinstance(value, Tensor)]
    return tuple(value.dtype for value in kept if value.shape == parameter.shape)


def _trial_of(optimizer: Optimizer, at: int, parameters: list[Tensor]) -> Optimizer:
    """A twin with only the parameter group `at`, over small tensors, without hooks."""
    trial = twin_of(optimizer, [parameters for _ in optimizer.param_groups])
    # The trial may change lists and dicts in place, so it gets copies.
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
    # Some optimizers create their state in the constructor: the trial gets a sample of it, in the new shapes.
    states = [(p, optimizer.state[p]) for p in optimizer.param_groups[at]["params"] if optimizer.state.get(p)]
    like, sample = next(
        (state for state in states if local_part(state[0]).numel()), states[0] if states else (None, {})
    )
    for parameter in parameters:
        trial.state[parameter] = {key: _sample(value, like, parameter, key) for key, value in sample.items()}
    return trial


def _sample(value: Any, like: Any, parameter: Tensor, name: str) -> Any:
    """A state value for `parameter` like the `value` that was kept for the parameter `like`."""
    if isinstance(value, Tensor) and name != "step" and value.shape == like.shape:
        own = local_part(value).flatten()  # may be empty on this rank
        return torch.full_like(parameter, float(own[0]) if own.numel() else 0.0)
    return torch.zeros((), device="cpu") if name == "step" and isinstance(value, Tensor) else copy.deepcopy(value)


def twin_of(optimizer: Optimizer, parameters: Sequence[Sequence[Tensor]]) -> Optimizer:
    """A second optimizer of the same class with the same attributes, over other tensors and without state."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler may have set it to a method bound to the original
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": list(tensors)} for group, tensors in zip(optimizer.param_groups, parameters, strict=True)
    ]
    return twin
