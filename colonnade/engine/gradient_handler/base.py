"""The contract of a gradient handler, and the handler that only has to say *what*, not *how*."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.parallel.demand import Owed
from colonnade.reduce.options import SyncOptions
from colonnade.reduce.plan import Plan, group_plans, make_sums
from colonnade.reduce.records import Choice, Demand, Reduction, choose, group_reductions, read_demands
from colonnade.reduce.synchroniser import Synchroniser


class BaseGradientHandler(ABC):
    """Reduces gradients across ranks before the optimizer steps.

    Write your own by implementing `handle_gradient`, register it in `GRADIENT_HANDLER`, and name it in the
    config. The engine calls it once per step, after backward, on every rank. One that communicates while backward
    runs implements `prepare` too.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._context: ParallelContext | None = None

    @abstractmethod
    def handle_gradient(self) -> None:
        """Bring the gradients that this handler is responsible for into their final state, in place."""

    def prepare(self, last: bool) -> None:
        """Called before each backward pass; `last`: of those that make one step."""

    def set_scale(self, scale: float | Tensor | None) -> bool:
        """Called before `handle_gradient`: a further factor on the gradients of this step (None: none).

        Return True if `handle_gradient` multiplies by it; else the engine does, after it.
        """
        return False

    def close(self) -> None:
        """Called when the engine is closed: remove hooks, free what was taken."""

    def covers(self) -> list[Reduction] | None:
        """The reductions that `handle_gradient` does, for the ledger.

        None (the default) means "look": the engine runs the handler once on marked gradients and finds out.
        """
        return None

    @property
    def context(self) -> ParallelContext:
        """The context it works in: the engine's, or the global one if it is used by itself."""
        if self._context is None:
            from colonnade.core import global_context  # the one ambient value, for handlers used by hand

            self._context = global_context
        return self._context

    def attach(self, context: ParallelContext) -> None:
        """Called by the engine before anything else."""
        self._context = context

    def demands(self) -> list[Demand]:
        """What each parameter of the model owes on this rank."""
        return read_demands(self._model, self.context.layout, self.context.get_global_rank())


class PlannedGradientHandler(BaseGradientHandler):
    """A handler that says what to reduce; buckets, overlap with backward and waiting come with it.

    Implement `plan()`. Options of `SyncOptions` (bucket_mb, overlap, compress, ...) may be given in the config.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None, **options: Any) -> None:
        super().__init__(model, optimizer)
        SyncOptions.read(options)  # an unknown or impossible one is said now
        self.options = options
        self._synchroniser: Synchroniser | None = None
        self._by_hand = False

    @abstractmethod
    def plan(self) -> list[Reduction]:
        """The reductions of this handler, as data. Pure: needs a layout, no process group."""

    def covers(self) -> list[Reduction]:
        return self.plan()

    def over(self, mode: ParallelMode, which: Choice = None, divisor: float | None = None) -> list[Reduction]:
        """ "These parameters, over this mode": one line of a plan.

        The divisor is what the placements demand, unless you give another (which the ledger then checks).
        """
        mode = ParallelMode(mode)
        ranks = tuple(self.context.get_ranks_in_group(mode))
        pairs = []
        for demand in choose(self.demands(), which):
            due = next((factor for factor in demand.owed if factor.mode is mode), None)
            share = divisor if divisor is not None else due.divisor if due is not None else 1
            pairs.append((demand, Owed(mode, due.ranks if due is not None else ranks, share)))  # type: ignore[arg-type]
        return group_reductions(pairs)

    def use(self, synchroniser: Synchroniser) -> None:
        """Share one synchroniser with the other planned handlers of an engine, so that each gradient moves once."""
        self._synchroniser = synchroniser

    def handle_gradient(self) -> None:
        if self._synchroniser is None:
            plan = Plan(type(self).__name__, self.plan(), self.options)
            sums = make_sums(group_plans([plan], self.context, {}), self.context)
            self._synchroniser, self._by_hand = Synchroniser(sums), True
        if self._by_hand:
            # Used by hand there is no engine to say when backward begins: it has just ended.
            self._synchroniser.prepare(last=True)
        self._synchroniser.finish()


class DemandGradientHandler(PlannedGradientHandler):
    """A planned handler that does what the placements demand over its `modes` (None: over all)."""

    modes: frozenset[ParallelMode] | None = None
    reason: str = ""
    """Why it is attached when nobody names it."""

    def __init__(self, model: nn.Module, optimizer: Any = None, **options: Any) -> None:
        super().__init__(model, optimizer, **options)
        self._only: set[tuple[str, ParallelMode]] | None = None

    def limit_to(self, rows: Iterable[tuple[str, ParallelMode]]) -> None:
        """Do only these (parameter, mode) rows of the ledger; the others are somebody else's."""
        self._only = set(rows)

    def plan(self) -> list[Reduction]:
        return self.plan_for(self.demands())

    def plan_for(self, demands: Iterable[Demand]) -> list[Reduction]:
        """The reductions of this handler among what these parameters owe."""
        return group_reductions(
            (demand, factor)
            for demand in demands
            for factor in demand.owed
            if (self.modes is None or factor.mode in self.modes)
            and (self._only is None or (demand.name, factor.mode) in self._only)
        )
