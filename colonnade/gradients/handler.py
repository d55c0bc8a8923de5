"""Gradient handlers: the base classes that users inherit, the built-in handlers, and from a config to handlers.

A `BaseGradientHandler` sums by hand in `handle_gradient`. A `PlannedGradientHandler` returns reductions in `plan`, and the engine
carries them out. The built-in ones derive theirs from placements; those that nobody named are attached where a sum is owed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from colonnade.config.settings import SyncOptions
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ColonnadeError, ConfigError, GradientError
from colonnade.gradients.ledger import Ledger
from colonnade.gradients.sums import (
    Choice,
    Demand,
    Reduction,
    choose,
    group_reductions,
    read_demands,
    sums_of,
    with_groups,
)
from colonnade.gradients.synchroniser import Synchroniser
from colonnade.parallel.demand import Owed
from colonnade.registry import GRADIENT_HANDLER


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
        """Nothing in an engine, which sums all planned gradients together before any handler runs; by hand, all of it."""
        if self._synchroniser is None:
            sums = sums_of([(self, self.plan())], self.context, {})
            self._synchroniser, self._by_hand = Synchroniser(with_groups(sums, self.context)), True
        if self._by_hand:
            # Used by hand there is no engine to say when backward begins: it has just ended.
            self._synchroniser.prepare(last=True)
            self._synchroniser.wait()


class DemandGradientHandler(PlannedGradientHandler):
    """A planned handler that does what the placements demand over its `modes` (None: over all)."""

    modes: frozenset[ParallelMode] | None = None
    when: frozenset[ParallelMode] | None = None
    """For the automatic ones: attached where a sum over one of these modes is open (None: over any)."""
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


# --- Built-in handlers: each does what the placements demand over its modes -----------------------


@GRADIENT_HANDLER.register_module
class DataParallelGradientHandler(DemandGradientHandler):
    """Sums over DATA and divides by the number of ranks that saw distinct data; does nothing on one data rank."""

    modes = frozenset({ParallelMode.DATA})
    when = frozenset({ParallelMode.DATA})
    reason = "data parallelism: replicas see different samples"


@GRADIENT_HANDLER.register_module
class MoeGradientHandler(DemandGradientHandler):
    """Dense parameters: a mean over DATA. Experts: a sum over EXPERT_DATA, divided by all who sent tokens.

    An expert's gradient already holds the tokens of every rank of its expert group, so the divisor is the
    number of data ranks and not the size of the (smaller) group that communicates.
    """

    modes = frozenset({ParallelMode.DATA, ParallelMode.EXPERT_DATA, ParallelMode.MOE_DATA})
    when = frozenset({ParallelMode.EXPERT_DATA, ParallelMode.MOE_DATA})
    reason = "expert parallelism: experts are reduced over their expert-data twin"


@GRADIENT_HANDLER.register_module
class SequenceParallelGradientHandler(DemandGradientHandler):
    """Sums over data and sequence at once (SEQUENCE_DP) and divides by the number of distinct parts."""

    modes = frozenset({ParallelMode.DATA, ParallelMode.SEQUENCE, ParallelMode.SEQUENCE_DP})
    when = frozenset({ParallelMode.SEQUENCE, ParallelMode.SEQUENCE_DP})
    reason = "sequence parallelism: ranks see different tokens"


@GRADIENT_HANDLER.register_module
class PipelineSharedModuleGradientHandler(DemandGradientHandler):
    """Sums the gradients of a tied parameter over its stages; each stage has its own part of it."""

    modes = frozenset({ParallelMode.PIPELINE})
    when = frozenset({ParallelMode.PIPELINE})
    reason = "tied parameters: each stage has a part of the gradient"


@GRADIENT_HANDLER.register_module
class PlacementGradientHandler(DemandGradientHandler):
    """Does whatever reduction the placements demand, over any mode."""

    reason = "placements that owe a sum over another mode"


@GRADIENT_HANDLER.register_module
class ZeROGradientHandler(BaseGradientHandler):
    """Asks an optimizer that sums gradients itself, by its `sync_grad()`.

    Such an optimizer may have `prepare(last)`, called before each backward pass, and `set_scale(scale)`.
    """

    reason = "the optimizer sums gradients itself and has sync_grad()"

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        super().__init__(model, optimizer)
        if not callable(getattr(optimizer, "sync_grad", None)):
            raise GradientError(
                f"ZeROGradientHandler needs an optimizer with sync_grad(), not {type(optimizer).__name__}; "
                f"use DataParallelGradientHandler for an ordinary one",
                code="C042",
            )

    def prepare(self, last: bool) -> None:
        if callable(getattr(self._optimizer, "prepare", None)):
            self._optimizer.prepare(last)

    def set_scale(self, scale: float | Tensor | None) -> bool:
        if not callable(getattr(self._optimizer, "set_scale", None)):
            return False
        self._optimizer.set_scale(scale)
        return True

    def handle_gradient(self) -> None:
        self._optimizer.sync_grad()

    def covers(self) -> list[Reduction]:
        """All that is owed by the parameters in the optimizer's groups."""
        owned = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        return group_reductions(
            (demand, factor) for demand in self.demands() if id(demand.parameter) in owned for factor in demand.owed
        )


# --- Attached by themselves, where nobody does what is owed ---------------------------------------


AUTOMATIC: tuple[type[DemandGradientHandler], ...] = (
    PipelineSharedModuleGradientHandler,
    MoeGradientHandler,
    SequenceParallelGradientHandler,
    DataParallelGradientHandler,
    PlacementGradientHandler,
)
"""Read from top to bottom: the first class one of whose `when` modes is owed takes all open rows of its modes.

Before these, an optimizer with `sync_grad()` gets a ZeROGradientHandler, as if it had been named (`build_handlers`).
"""


def attach_automatic(ledger: Ledger, model: nn.Module, optimizer: Any) -> tuple[list[DemandGradientHandler], Ledger]:
    """Handlers for every row that no named handler does, each limited to its rows; and the ledger with them."""
    left = [(row.parameter, ParallelMode[row.mode]) for row in ledger.open_rows()]
    attached: list[DemandGradientHandler] = []
    done: dict[tuple[str, str], str] = {}
    for kind in AUTOMATIC:
        modes, when = kind.modes, kind.when
        if not left or (when is not None and not any(mode in when for _, mode in left)):
            continue
        mine = [(name, mode) for name, mode in left if modes is None or mode in modes]
        left = [(name, mode) for name, mode in left if not (modes is None or mode in modes)]
        handler = kind(model, optimizer)
        handler.limit_to(mine)
        attached.append(handler)
        done.update(((name, mode.name), type(handler).__name__) for name, mode in mine)
    return attached, ledger.filled(done)


def describe(attached: Sequence[Any], named: Sequence[Any]) -> str:
    """Which handlers there are, and why, as one line for the log."""
    lines = [f"{type(handler).__name__}: {handler.reason}" for handler in attached]
    lines += [
        f"{type(handler).__name__}: {getattr(handler, 'reason', '') or 'named in the config'}" for handler in named
    ]
    return "gradient handlers: " + ("; ".join(lines) or "none, no gradient owes a reduction")


# --- From a config to handlers --------------------------------------------------------------------


BuiltHandler = tuple[BaseGradientHandler, list[Reduction] | None]
"""A named handler and the reductions that it says it does; None: a trial must find out."""


def build_handlers(
    named: Sequence[Any],
    model: nn.Module,
    optimizer: Any,
    context: ParallelContext,
    failed: Callable[[str, ColonnadeError], None] | None = None,
) -> list[BuiltHandler]:
    """The handlers that the config names, and that of an optimizer with `sync_grad()`, attached to the context.

    `failed` is told of the name and the error of each that cannot be built, which is left out then; without it the error is
    raised.
    """
    refuse = failed if failed is not None else _raise
    handlers: list[BaseGradientHandler] = []
    for entry in named:
        try:
            handlers.append(build_gradient_handler(entry, model, optimizer))
        except ColonnadeError as error:
            refuse(entry if isinstance(entry, str) else entry["type"], error)
    asked = any(isinstance(handler, ZeROGradientHandler) for handler in handlers)
    if callable(getattr(optimizer, "sync_grad", None)) and not asked:
        handlers.insert(0, ZeROGradientHandler(model, optimizer))
    for handler in handlers:
        handler.attach(context)
    found: list[BuiltHandler] = []
    for handler in handlers:
        try:
            found.append((handler, handler.covers()))
        except ColonnadeError as error:
            refuse(type(handler).__name__, error)
    return found


def _raise(name: str, error: ColonnadeError) -> None:
    raise error


def build_gradient_handler(entry: Any, model: nn.Module, optimizer: Any) -> BaseGradientHandler:
    """A handler from the config: `dict(type="Name", **kwargs)`, or just its name."""
    settings = {"type": entry} if isinstance(entry, str) else dict(entry)
    name = settings.pop("type")
    handler_class = GRADIENT_HANDLER.get_module(name)
    try:
        handler = handler_class(model, optimizer, **settings)
    except TypeError as error:
        raise ConfigError(
            f"gradient_handler: {name} could not be built with {settings or 'no further arguments'}: {error}. It is "
            f"called as {name}(model, optimizer, **the rest of its dict in the config).",
            code="C042",
        ) from error
    if not callable(getattr(handler, "handle_gradient", None)):
        raise ConfigError(
            f"gradient_handler: {name} has no handle_gradient(); inherit BaseGradientHandler", code="C042"
        )
    return handler
