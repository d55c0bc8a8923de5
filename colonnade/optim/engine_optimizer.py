"""The interface of optimizers to the engine, for plain optimizers and for optimizers sharded by ZeRO 1 or 2.

The last part of this file finds properties of an optimizer by a trial: a copy of the optimizer takes steps on small matrices.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colonnade.comm.waits import WaitWatch
from colonnade.context.parallel_context import ParallelContext
from colonnade.gradients.sums import Shards
from colonnade.gradients.synchroniser import Synchroniser
from colonnade.optim.bucket_step import (
    BucketStep,
    OwnedBucket,
    ReplicatedBucket,
    can_scatter,
    scattered_buckets,
    wants_flat,
)
from colonnade.parallel.held import Held
from colonnade.parallel.placement import local_part

GradientSlice = tuple[Tensor, int, int, Tensor | None]
"""(parameter, start and stop of this rank's elements in memory, their reduced gradient or None if no rank had one)."""


class EngineOptimizer(ABC):
    """Base class: the methods of an optimizer that the engine calls."""

    is_sharded = False
    """Whether reduced gradients are in `gradient_slices` instead of in `.grad`."""

    @property
    @abstractmethod
    def user_optimizer(self) -> Any:
        """The optimizer that users, schedulers and gradient handlers see: `engine.optimizer`."""

    @property
    @abstractmethod
    def stepped(self) -> Any:
        """The torch optimizer that has the state of this rank: for a sharded optimizer its twin, otherwise the user's
        optimizer.
        """

    @property
    @abstractmethod
    def masters(self) -> Sequence[Tensor]:
        """The master copies of weights, in another dtype or on another device; empty if there are none."""

    @property
    @abstractmethod
    def is_flat(self) -> bool:
        """Whether steps use flat memory, as `wants_flat` decides for the tensors that this rank steps on."""

    # -- before the first step ----------------------------------------------------------------------------

    @abstractmethod
    def plan_shards(self, pipeline: bool) -> Shards | None:
        """The parameters whose gradients are sharded, with the sharding options; None if no gradient is sharded.

        `pipeline`: whether a pipeline schedule runs several backward passes per step.
        """

    @abstractmethod
    def needs_buckets(self, planned_on: str | None = None) -> bool:
        """Whether all gradients must be in buckets, including those that need no reduction.

        `planned_on`: for a simulated run, the device type of the machine that is planned for.
        """

    @abstractmethod
    def attach(self, synchroniser: Synchroniser, waits: WaitWatch) -> None:
        """Prepare the sharded buckets. Called after buckets are laid out. Collective."""

    @abstractmethod
    def make_step(
        self,
        synchroniser: Synchroniser,
        held: Sequence[Held],
        slot_of: Callable[[Held], int],
        context: ParallelContext,
    ) -> BucketStep:
        """Create the `BucketStep`, which measures this rank's contribution to the norm and runs the step.

        Args:
            synchroniser: The gradient buckets.
            held: The parameters of this rank, with their replicas.
            slot_of: The slot of a parameter in the norm and in the divisor.
            context: The parallel context.
        """

    # -- each step ----------------------------------------------------------------------------------------

    @abstractmethod
    def step_divided(self, divisor: Tensor | None, found_inf: Tensor | None) -> None:
        """Step on the reduced gradient divided by `divisor`, unless `found_inf` is 1.

        Args:
            divisor: One number, or one per slot; None if the step is not clipped.
            found_inf: 1 to skip the step, on the device; None if the step is never skipped.
        """

    @abstractmethod
    def wait(self) -> None:
        """Wait until all parameters are gathered."""

    @abstractmethod
    def gradient_slices(self) -> Iterator[GradientSlice]:
        """Yield this rank's slices of the reduced gradients of sharded parameters. (The gradients of other parameters are in
        `.grad`.)"""

    @abstractmethod
    def close(self) -> None:
        """Remove hooks; parameters and state stay valid."""


class PlainOptimizer(EngineOptimizer):
    """An unsharded optimizer: one of torch, or any object with `param_groups` and `step()`.

    `flat`: the key `flat_step` of the config.
    """

    _step: BucketStep

    def __init__(self, optimizer: Any, model: nn.Module, flat: bool | None = None) -> None:
        self._optimizer, self._model, self._flat = optimizer, model, flat

    @property
    def user_optimizer(self) -> Any:
        return self._optimizer

    @property
    def stepped(self) -> Any:
        # A user's own sharded optimizer may define `stepped` and `masters`; see `ShardedOptimizer`.
        return getattr(self._optimizer, "stepped", self._optimizer)

    @property
    def masters(self) -> Sequence[Tensor]:
        return getattr(self._optimizer, "masters", ())

    @cached_property
    def is_flat(self) -> bool:
        return wants_flat(list(self._model.parameters()), self._optimizer, self._flat)

    def plan_shards(self, pipeline: bool) -> Shards | None:
        return None

    def needs_buckets(self, planned_on: str | None = None) -> bool:
        # The Triton kernels read gradients at any address.
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        return self.is_flat and not all(can_scatter(parameter, planned_on) for parameter in trained)

    def attach(self, synchroniser: Synchroniser, waits: WaitWatch) -> None:
        pass

    def make_step(
        self,
        synchroniser: Synchroniser,
        held: Sequence[Held],
        slot_of: Callable[[Held], int],
        context: ParallelContext,
    ) -> BucketStep:
        entry_of = {id(entry.tensor): entry for entry in held}
        scattered = [
            entry
            for entry in held
            if self.is_flat and id(entry.tensor) not in synchroniser.parameters and can_scatter(entry.tensor)
        ]
        # On GPUs, reading the full gradient on every rank is cheaper than a collective that combines contributions to the norm.
        replicated = all(entry.holding.count == context.world_size for entry in held)
        measures_full_gradient = replicated and context.world_size > 1 and context.device.type == "cuda"

        def buckets() -> list[OwnedBucket]:
            made: list[OwnedBucket] = []
            for bucket in synchroniser.layout:
                entries = [entry_of[id(parameter)] for parameter in bucket.parameters]
                made.append(
                    ReplicatedBucket(bucket, entries, [slot_of(entry) for entry in entries], measures_full_gradient)
                )
            trained = [entry for entry in scattered if entry.tensor.requires_grad]
            return [*made, *scattered_buckets(trained, [slot_of(entry) for entry in trained], measures_full_gradient)]

        def generation() -> object:
            return synchroniser.generation, [entry.tensor.requires_grad for entry in scattered]

        self._step = BucketStep(
            self._optimizer, buckets, generation, held, slot_of, self.is_flat, self._model, measures_full_gradient
        )
        return self._step

    def step_divided(self, divisor: Tensor | None, found_inf: Tensor | None) -> None:
        self._step.step_divided(divisor, found_inf)

    def wait(self) -> None:
        pass

    def gradient_slices(self) -> Iterator[GradientSlice]:
        yield from ()

    def close(self) -> None:
        self._step.close()


def groups_by_options(optimizer: Optimizer) -> list[list[int]]:
    """The indices of non-empty parameter groups, in lists of groups with equal options.

    Options that are numbers are equal if both are zero or both are not.
    """
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
    """Run two steps of a copy of the optimizer on a random matrix, and on shards of this matrix with the same gradients.

    Args:
        optimizer: The optimizer; the steps are run by a copy.
        at: The index of the parameter group whose options are used.
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
    """The dtypes of the state tensors that the optimizer keeps per element of a parameter of `dtype`; empty if the trial step
    fails."""
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
    """Make a second optimizer of the same class, with the same attributes, for other tensors and without state (a twin)."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler may have set it to a method bound to the original
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": list(tensors)} for group, tensors in zip(optimizer.param_groups, parameters, strict=True)
    ]
    return twin
