"""What an engine asks of its optimizer: one interface for a plain optimizer and for one that ZeRO 1 or 2 shards.

The engine, its step, the guard, the tables of memory and precision and `colonnade.proof` ask this interface and nothing
else; nobody probes an optimizer for attributes. `initialize` makes one of two kinds:

- `PlainOptimizer` here: the optimizer as the user gave it (also at stage 3, where FSDP2 has sharded its parameters).
  Every rank owns all elements of its parameters. It steps over flat memory where that means the same, else by itself.
- `ZeroOptimizer` in `colonnade.optim.zero`: each rank owns slices of the parameters, and steps on these.

The order of calls: `plan_shards` and `needs_buckets` before the gradient buckets are laid out, `attach` when they are,
`make_step` when the engine knows the clip groups, then `step_divided` once a step, and `close`.

What a checkpoint must know of a sharded optimizer is a smaller interface that a user's own optimizer may have as well:
`ShardedOptimizer` in `colonnade.parallel.flat`.
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
"""(parameter, first and last + 1 of this rank's elements in memory, their final gradient; None where no rank had one)."""


class EngineOptimizer(ABC):
    """An optimizer as an engine drives it."""

    is_sharded = False
    """Whether final gradients lie in slices of the ranks (`gradient_slices`) instead of in `.grad`."""

    @property
    @abstractmethod
    def user_optimizer(self) -> Any:
        """What users, schedulers and gradient handlers see: `engine.optimizer`."""

    @property
    @abstractmethod
    def stepped(self) -> Any:
        """The optimizer that has the state of what this rank steps on; of one that is not sharded, itself."""

    @property
    @abstractmethod
    def masters(self) -> Sequence[Tensor]:
        """Copies of weights in another dtype, or on another device, that are stepped on."""

    @property
    @abstractmethod
    def is_flat(self) -> bool:
        """Whether steps go over flat memory, decided by `wants_flat` for what this rank steps on."""

    # -- before the first step ----------------------------------------------------------------------------

    @abstractmethod
    def plan_shards(self, pipeline: bool) -> Shards | None:
        """What of the gradients is to be sharded, and how; None: nothing. `pipeline`: a schedule runs many passes a step."""

    @abstractmethod
    def needs_buckets(self, graph: bool, planned_on: str | None = None) -> bool:
        """Whether all gradients must lie in buckets, also those that no other rank has a part in.

        `graph`: the key `graph_step` of the config. `planned_on`: for a plan, the kind of device of the machine that it is for.
        """

    @abstractmethod
    def attach(self, synchroniser: Synchroniser, waits: WaitWatch) -> None:
        """Take over what of the laid out buckets is sharded. Collective."""

    @abstractmethod
    def make_step(
        self,
        synchroniser: Synchroniser,
        held: Sequence[Held],
        slot_of: Callable[[Held], int],
        context: ParallelContext,
    ) -> BucketStep:
        """What measures this rank's part of the gradient, and steps. `held`: who else holds each parameter; `slot_of`:
        its slot in the norm and in the divisor."""

    # -- each step ----------------------------------------------------------------------------------------

    @abstractmethod
    def step_divided(self, divisor: Tensor | None, found_inf: Tensor | None) -> None:
        """Step on the final gradient divided by `divisor` (one number, or one per slot), unless `found_inf` is 1.

        None: a step that is neither clipped nor dropped.
        """

    @abstractmethod
    def wait(self) -> None:
        """Every parameter is whole when this returns."""

    @abstractmethod
    def gradient_slices(self) -> Iterator[GradientSlice]:
        """What this rank owns of the final gradients of sharded parameters; of the others they are in `.grad`."""

    @abstractmethod
    def close(self) -> None:
        """Remove hooks; parameters and state stay where they are."""


class PlainOptimizer(EngineOptimizer):
    """An optimizer of whole parameters: torch's, or any object with `param_groups` and `step()`."""

    _step: BucketStep

    def __init__(self, optimizer: Any, model: nn.Module, flat: bool | None = None) -> None:
        """`flat`: the key `flat_step` of the config."""
        self._optimizer, self._model, self._flat = optimizer, model, flat

    @property
    def user_optimizer(self) -> Any:
        return self._optimizer

    @property
    def stepped(self) -> Any:
        # A sharded optimizer of the user's own may say both; see `ShardedOptimizer`.
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
        # Kernels find gradients wherever autograd has put them; but a graph of a step needs gradients that stay where they are.
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        anywhere = not graph and all(can_scatter(parameter, planned_on) for parameter in trained)
        return self.is_flat and not anywhere

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
        alone = [
            entry
            for entry in held
            if self.is_flat and id(entry.tensor) not in synchroniser.parameters and can_scatter(entry.tensor)
        ]
        # On a GPU it costs less that every rank reads the whole gradient than a collective that joins parts of a norm.
        everywhere = all(entry.holding.count == context.world_size for entry in held)
        whole = everywhere and context.world_size > 1 and context.device.type == "cuda"

        def buckets() -> list[OwnedBucket]:
            made: list[OwnedBucket] = []
            for bucket in synchroniser.layout:
                entries = [entry_of[id(parameter)] for parameter in bucket.parameters]
                made.append(ReplicatedBucket(bucket, entries, [slot_of(entry) for entry in entries], whole))
            mine = [entry for entry in alone if entry.tensor.requires_grad]
            return [*made, *scattered_buckets(mine, [slot_of(entry) for entry in mine], whole)]

        def generation() -> object:
            return synchroniser.generation, [entry.tensor.requires_grad for entry in alone]

        self._step = BucketStep(self._optimizer, buckets, generation, held, slot_of, self.is_flat, self._model, whole)
        return self._step

    def step_divided(self, divisor: Tensor | None, found_inf: Tensor | None) -> None:
        self._step.step_divided(divisor, found_inf)

    def wait(self) -> None:
        pass

    def gradient_slices(self) -> Iterator[GradientSlice]:
        yield from ()

    def close(self) -> None:
        self._step.close()
