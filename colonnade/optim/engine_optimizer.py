"""The interface between an engine and its optimizer, for plain optimizers and for those sharded by ZeRO 1 or 2.

The engine, its step, the replica check, the memory and precision tables and `colonnade.proof` use this interface only; none of
them probes an optimizer for attributes. `initialize` creates one of two kinds:

- `PlainOptimizer` here: the user's optimizer as it is (also at ZeRO stage 3, where FSDP2 has sharded its parameters). Every rank
  steps on all elements of its parameters, over flat memory if that gives the same result.
- `ZeroOptimizer` in `colonnade.optim.zero`: each rank steps on its slices of the parameters.

The order of calls: `plan_shards` and `needs_buckets` before the gradient buckets are laid out, `attach` afterwards, `make_step`
when the engine knows the clip groups, then `step_divided` once a step, and finally `close`.

Checkpoints use a smaller interface of sharded optimizers, which a user's own optimizer may have as well: `ShardedOptimizer` in
`colonnade.parallel.flat`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn

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

GradientSlice = tuple[Tensor, int, int, Tensor | None]
"""(parameter, start and stop of this rank's elements in memory, their reduced gradient or None if no rank had one)."""


class EngineOptimizer(ABC):
    """An optimizer as the engine drives it."""

    is_sharded = False
    """Whether reduced gradients are in `gradient_slices` instead of in `.grad`."""

    @property
    @abstractmethod
    def user_optimizer(self) -> Any:
        """The optimizer that users, schedulers and gradient handlers see: `engine.optimizer`."""

    @property
    @abstractmethod
    def stepped(self) -> Any:
        """The optimizer that holds the state of this rank; the optimizer itself if it is not sharded."""

    @property
    @abstractmethod
    def masters(self) -> Sequence[Tensor]:
        """Master copies of weights, in another dtype or on another device."""

    @property
    @abstractmethod
    def is_flat(self) -> bool:
        """Whether steps are over flat memory, as decided by `wants_flat` for the tensors that this rank steps on."""

    # -- before the first step ----------------------------------------------------------------------------

    @abstractmethod
    def plan_shards(self, pipeline: bool) -> Shards | None:
        """The parameters whose gradients are sharded, and how; None for none. `pipeline`: a schedule runs many passes a step."""

    @abstractmethod
    def needs_buckets(self, graph: bool, planned_on: str | None = None) -> bool:
        """Whether all gradients must be in buckets, including those that need no reduction.

        Args:
            graph: The key `graph_step` of the config.
            planned_on: For a simulated run, the device type of the machine that is planned for.
        """

    @abstractmethod
    def attach(self, synchroniser: Synchroniser, waits: WaitWatch) -> None:
        """Prepare the sharded buckets, once buckets are laid out. Collective."""

    @abstractmethod
    def make_step(
        self,
        synchroniser: Synchroniser,
        held: Sequence[Held],
        slot_of: Callable[[Held], int],
        context: ParallelContext,
    ) -> BucketStep:
        """Create the object that measures this rank's contribution to the norm, and steps.

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
        """This rank's slices of the reduced gradients of sharded parameters; other gradients are in `.grad`."""

    @abstractmethod
    def close(self) -> None:
        """Remove hooks; parameters and state stay valid."""


class PlainOptimizer(EngineOptimizer):
    """An unsharded optimizer: torch's, or any object with `param_groups` and `step()`.

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

    def needs_buckets(self, graph: bool, planned_on: str | None = None) -> bool:
        # The Triton kernels read gradients at any address, but a CUDA graph needs them at the same addresses in every step.
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        any_address = not graph and all(can_scatter(parameter, planned_on) for parameter in trained)
        return self.is_flat and not any_address

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
