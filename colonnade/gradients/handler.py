"""Gradient handlers: the base classes for custom handlers, the built-in handlers, and the assignment of reductions to handlers.

A `BaseGradientHandler` calls collectives itself, in `handle_gradient`. A `PlannedGradientHandler` only declares its reductions, in
`reductions()`, and the engine performs them. The built-in handlers derive their reductions from placements; built-in
handlers that the config does not name are attached automatically if a required reduction has no named handler.

`plan_sums` compares the reductions of the named handlers with those that placements require (parallel.demand.owed), assigns the
remaining ones to automatic handlers, and joins all reductions of a parameter into one sum. This is arithmetic on a layout and needs
no process group. `initialize` performs the result, `colonnade plan` estimates its cost, `colonnade explain` prints its ledger.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from colonnade.config.settings import SyncOptions, SyncSettings
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ColonnadeError, ConfigError, GradientError
from colonnade.gradients.ledger import Ledger, match, require_complete
from colonnade.gradients.sums import (
    Choice,
    Claim,
    Demand,
    Reduction,
    Shards,
    Sum,
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
    """Reduces gradients over ranks before the optimizer steps.

    A custom handler implements `handle_gradient`, is registered in `GRADIENT_HANDLER` and named in the config. The engine
    calls it once per step, after backward, on every rank. A handler that communicates during backward implements
    `prepare`, too.

    Args:
        model: The model of this rank.
        optimizer: The optimizer as it was given to `initialize`.

    Example::

        import torch.distributed as dist
        from colonnade.engine.gradient_handler import BaseGradientHandler
        from colonnade.registry import GRADIENT_HANDLER

        @GRADIENT_HANDLER.register_module
        class OneByOne(BaseGradientHandler):
            def handle_gradient(self):
                for parameter in self._model.parameters():
                    dist.all_reduce(parameter.grad, group=self.context.get_group(colonnade.ParallelMode.DATA))
                    parameter.grad /= self.context.data_parallel_size

        gpc = colonnade.launch(dict(gradient_handler=["OneByOne"]))
    """

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._context: ParallelContext | None = None

    @abstractmethod
    def handle_gradient(self) -> None:
        """Reduce the gradients that this handler is responsible for, in place. Collective over the ranks it reduces over."""

    def prepare(self, last: bool) -> None:
        """Called before each backward pass; `last` is True for the last micro-batch of a step."""

    def set_scale(self, scale: float | Tensor | None) -> bool:
        """Called before `handle_gradient` with an additional factor for the gradients of this step (None: no factor).

        Returns:
            True if `handle_gradient` multiplies by `scale`; if False, the engine does so after `handle_gradient`.
        """
        return False

    def close(self) -> None:
        """Called when the engine is closed: remove hooks and free resources."""

    def covers(self) -> list[Reduction] | None:
        """The reductions that `handle_gradient` performs, for the ledger.

        None (the default) requests the probe: `initialize` runs the handler on probe gradients and reads its reductions from
        the result.
        """
        return None

    @property
    def context(self) -> ParallelContext:
        """The parallel context: the engine's, or the global one for a handler used without an engine."""
        if self._context is None:
            from colonnade.core import global_context

            self._context = global_context
        return self._context

    def attach(self, context: ParallelContext) -> None:
        """Set the parallel context. Called by the engine before any other method."""
        self._context = context

    def demands(self) -> list[Demand]:
        """The required reductions of each parameter on this rank."""
        return read_demands(self._model, self.context.layout, self.context.get_global_rank())


class PlannedGradientHandler(BaseGradientHandler):
    """A handler that only declares its reductions; the engine performs them, with buckets and overlap with backward.

    A custom handler implements `reductions()`.

    Args:
        model: The model of this rank.
        optimizer: The optimizer as it was given to `initialize`.
        options: Fields of `SyncOptions` (bucket_mb, overlap, compress, ...), usually from the config.

    Example::

        from colonnade.engine.gradient_handler import PlannedGradientHandler
        from colonnade.registry import GRADIENT_HANDLER

        @GRADIENT_HANDLER.register_module
        class BiasHandler(PlannedGradientHandler):
            def reductions(self):
                return self.over(colonnade.ParallelMode.DATA, "*.bias")

        gpc = colonnade.launch(dict(gradient_handler=["BiasHandler"]))
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Accept handlers that still define `plan()`, the former name of `reductions()`."""
        super().__init_subclass__(**kwargs)
        # Both names are set on each class that defines one of them, so that super() finds the parent's method under either:
        # an alias in the base class alone would send an old subclass's super().plan() back to the subclass.
        if "reductions" in vars(cls):
            setattr(cls, "plan", vars(cls)["reductions"])  # noqa: B010
        elif callable(vars(cls).get("plan")):
            warnings.warn(
                f"{cls.__name__} defines plan(), which is deprecated; rename it to reductions()",
                DeprecationWarning,
                stacklevel=2,
            )
            setattr(cls, "reductions", vars(cls)["plan"])  # noqa: B010

    def __init__(self, model: nn.Module, optimizer: Any = None, **options: Any) -> None:
        super().__init__(model, optimizer)
        SyncOptions.read(options)  # raises for unknown or impossible options
        self.options = options
        self._synchroniser: Synchroniser | None = None
        self._without_engine = False

    @abstractmethod
    def reductions(self) -> list[Reduction]:
        """The reductions of this handler. Computed from the layout, without a process group."""

    def covers(self) -> list[Reduction]:
        return self.reductions()

    def over(self, mode: ParallelMode, which: Choice = None, divisor: float | None = None) -> list[Reduction]:
        """Reductions of some parameters over this rank's group of `mode`, to return from `reductions()`.

        Args:
            mode: The dimension of the device mesh to reduce over.
            which: The parameters: None for all, name patterns (`"*.bias"`), or a predicate of name and parameter.
            divisor: Divisor of the sum, which the ledger then checks; None for the divisor that the placements require.
        """
        mode = ParallelMode(mode)
        group_ranks = tuple(self.context.get_ranks_in_group(mode))
        pairs = []
        for demand in choose(self.demands(), which):
            # A parameter that needs no reduction over the mode is listed all the same: the ledger then reports it by name.
            required = next((factor for factor in demand.owed if factor.mode is mode), None)
            ranks, by = (required.ranks, required.divisor) if required is not None else (group_ranks, 1)
            pairs.append((demand, Owed(mode, ranks, by if divisor is None else divisor)))  # type: ignore[arg-type]
        return group_reductions(pairs)

    def use(self, synchroniser: Synchroniser) -> None:
        """Share a synchroniser with the other planned handlers of an engine, so that each gradient is sent once."""
        self._synchroniser = synchroniser

    def handle_gradient(self) -> None:
        """Reduce the gradients if the handler is used without an engine.

        In an engine this does nothing: the shared synchroniser has reduced all planned gradients before any handler runs.
        """
        if self._synchroniser is None:
            sums = sums_of([(self, self.reductions())], self.context, {})
            self._synchroniser, self._without_engine = Synchroniser(with_groups(sums, self.context)), True
        if self._without_engine:
            # No engine has announced the backward pass, which has just ended.
            self._synchroniser.prepare(last=True)
            self._synchroniser.wait()


class DemandGradientHandler(PlannedGradientHandler):
    """A planned handler that declares the reductions that placements require over its `modes` (None: over all modes)."""

    modes: frozenset[ParallelMode] | None = None
    when: frozenset[ParallelMode] | None = None
    """Attached automatically if a reduction over one of these modes has no handler (None: over any mode)."""
    reason: str = ""
    """The reason for attaching it automatically, for the log."""

    def __init__(self, model: nn.Module, optimizer: Any = None, **options: Any) -> None:
        super().__init__(model, optimizer, **options)
        self._only: set[tuple[str, ParallelMode]] | None = None

    def limit_to(self, rows: Iterable[tuple[str, ParallelMode]]) -> None:
        """Limit `reductions` to these (parameter, mode) rows of the ledger; other handlers are responsible for the other rows."""
        self._only = set(rows)

    def reductions(self) -> list[Reduction]:
        return self.reductions_among(self.demands())

    def reductions_among(self, demands: Iterable[Demand]) -> list[Reduction]:
        """The reductions in `demands` that this handler is responsible for."""
        return group_reductions(
            (demand, factor)
            for demand in demands
            for factor in demand.owed
            if (self.modes is None or factor.mode in self.modes)
            and (self._only is None or (demand.name, factor.mode) in self._only)
        )


# --- Built-in handlers: each performs the reductions that placements require over its modes -------


@GRADIENT_HANDLER.register_module
class DataParallelGradientHandler(DemandGradientHandler):
    """Declares the all-reduces over DATA, divided by the number of ranks with distinct data.

    Declares none on a single data rank.
    """

    modes = frozenset({ParallelMode.DATA})
    when = frozenset({ParallelMode.DATA})
    reason = "data parallelism: replicas see different samples"


@GRADIENT_HANDLER.register_module
class MoeGradientHandler(DemandGradientHandler):
    """Declares the reductions of a model with experts: dense parameters over DATA, experts over EXPERT_DATA (or MOE_DATA).

    The divisor of both is the number of data ranks; `parallel.demand.owed` computes it, and the synchroniser divides.
    For an expert, the group that communicates is smaller than this divisor, because the expert's gradient already
    contains the tokens of every rank of its expert group.
    """

    modes = frozenset({ParallelMode.DATA, ParallelMode.EXPERT_DATA, ParallelMode.MOE_DATA})
    when = frozenset({ParallelMode.EXPERT_DATA, ParallelMode.MOE_DATA})
    reason = "expert parallelism: experts are reduced over their expert-data group"


@GRADIENT_HANDLER.register_module
class SequenceParallelGradientHandler(DemandGradientHandler):
    """Declares the reductions over data and sequence (context parallelism), whose divisor is the number of ranks with distinct
    tokens."""

    modes = frozenset({ParallelMode.DATA, ParallelMode.SEQUENCE, ParallelMode.SEQUENCE_DP})
    when = frozenset({ParallelMode.SEQUENCE, ParallelMode.SEQUENCE_DP})
    reason = "context parallelism (sequence): ranks see different tokens"


@GRADIENT_HANDLER.register_module
class PipelineSharedModuleGradientHandler(DemandGradientHandler):
    """Declares the all-reduce of the gradient of a tied parameter over its pipeline stages, each of which has a partial
    gradient."""

    modes = frozenset({ParallelMode.PIPELINE})
    when = frozenset({ParallelMode.PIPELINE})
    reason = "tied parameters: each stage has a partial gradient"


@GRADIENT_HANDLER.register_module
class PlacementGradientHandler(DemandGradientHandler):
    """Declares every reduction that the placements require, over any mode."""

    reason = "placements that require a reduction over another mode"


@GRADIENT_HANDLER.register_module
class ZeROGradientHandler(BaseGradientHandler):
    """Calls `sync_grad()` of an optimizer that reduces gradients itself.

    If the optimizer has the methods `prepare(last)` and `set_scale(scale)`, they are called like those of a handler.
    """

    reason = "the optimizer reduces gradients itself, in sync_grad()"

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        super().__init__(model, optimizer)
        if not callable(getattr(optimizer, "sync_grad", None)):
            raise GradientError(
                f"ZeROGradientHandler needs an optimizer with sync_grad(), but {type(optimizer).__name__} has no "
                "sync_grad(). Use DataParallelGradientHandler.",
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
        """All required reductions of the parameters in the optimizer's groups."""
        owned = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        return group_reductions(
            (demand, factor) for demand in self.demands() if id(demand.parameter) in owned for factor in demand.owed
        )


# --- Automatic handlers: attached where no named handler performs a required reduction ------------


AUTOMATIC: tuple[type[DemandGradientHandler], ...] = (
    PipelineSharedModuleGradientHandler,
    MoeGradientHandler,
    SequenceParallelGradientHandler,
    DataParallelGradientHandler,
    PlacementGradientHandler,
)
"""Tried in this order: if a row over one of its `when` modes has no handler, a class takes all such rows over its `modes`.

Before these, `build_handlers` adds a ZeROGradientHandler for an optimizer with `sync_grad()`, as if the config had named it.
"""


def attach_automatic(ledger: Ledger, model: nn.Module, optimizer: Any) -> tuple[list[DemandGradientHandler], Ledger]:
    """Build automatic handlers for the ledger rows without a handler, each limited to its rows.

    Returns them, and the ledger with their names.
    """
    unhandled = [(row.parameter, ParallelMode[row.mode]) for row in ledger.open_rows()]
    attached: list[DemandGradientHandler] = []
    done_by: dict[tuple[str, str], str] = {}
    for handler_class in AUTOMATIC:
        modes, when = handler_class.modes, handler_class.when
        if not unhandled or (when is not None and not any(mode in when for _, mode in unhandled)):
            continue
        taken = [(name, mode) for name, mode in unhandled if modes is None or mode in modes]
        unhandled = [row for row in unhandled if row not in set(taken)]
        handler = handler_class(model, optimizer)
        handler.limit_to(taken)
        attached.append(handler)
        done_by.update(((name, mode.name), handler_class.__name__) for name, mode in taken)
    return attached, ledger.filled(done_by)


def describe(attached: Sequence[Any], named: Sequence[Any]) -> str:
    """A log line with the name of each handler and the reason why it is attached."""
    lines = [f"{type(handler).__name__}: {handler.reason}" for handler in attached]
    lines += [
        f"{type(handler).__name__}: {getattr(handler, 'reason', '') or 'named in the config'}" for handler in named
    ]
    return "gradient handlers: " + ("; ".join(lines) or "none, no gradient needs a reduction")


# --- From a config to handlers --------------------------------------------------------------------


BuiltHandler = tuple[BaseGradientHandler, list[Reduction] | None]
"""A named handler and the reductions that it declares; None if they must be probed."""


def build_handlers(
    named: Sequence[Any],
    model: nn.Module,
    optimizer: Any,
    context: ParallelContext,
    failed: Callable[[str, ColonnadeError], None] | None = None,
) -> list[BuiltHandler]:
    """Build the handlers that the config names, and a ZeROGradientHandler for an optimizer with `sync_grad()`; attach them to the
    context.

    Args:
        named: Entries of the config's `gradient_handler`.
        model: The model of this rank.
        optimizer: The optimizer as it was given to `initialize`.
        context: The parallel context of the engine.
        failed: Called with the name and the error of each handler that cannot be built, which is then left out. Without it
            the error is raised.
    """

    def refuse(name: str, error: ColonnadeError) -> None:
        if failed is None:
            raise error
        failed(name, error)

    handlers: list[BaseGradientHandler] = []
    for entry in named:
        try:
            handlers.append(build_gradient_handler(entry, model, optimizer))
        except ColonnadeError as error:
            refuse(entry if isinstance(entry, str) else entry["type"], error)
    is_named = any(isinstance(handler, ZeROGradientHandler) for handler in handlers)
    if callable(getattr(optimizer, "sync_grad", None)) and not is_named:
        handlers.insert(0, ZeROGradientHandler(model, optimizer))
    for handler in handlers:
        handler.attach(context)
    built: list[BuiltHandler] = []
    for handler in handlers:
        try:
            built.append((handler, handler.covers()))
        except ColonnadeError as error:
            refuse(type(handler).__name__, error)
    return built


def build_gradient_handler(entry: Any, model: nn.Module, optimizer: Any) -> BaseGradientHandler:
    """Build a handler from an entry of the config: the name of its class, or `dict(type="Name", **kwargs)`."""
    settings = {"type": entry} if isinstance(entry, str) else dict(entry)
    name = settings.pop("type")
    handler_class = GRADIENT_HANDLER.get_module(name)
    try:
        handler = handler_class(model, optimizer, **settings)
    except TypeError as error:
        raise ConfigError(
            f"the gradient handler {name} could not be built with {settings or 'no further arguments'}: {error}. The "
            f"config calls {name}(model, optimizer, **kwargs), where kwargs are the other keys of the handler's dict.",
            code="C042",
        ) from error
    if not callable(getattr(handler, "handle_gradient", None)):
        raise ConfigError(
            f"the gradient handler {name} has no handle_gradient(). Inherit BaseGradientHandler.", code="C042"
        )
    return handler


@dataclass(frozen=True)
class SumPlan:
    """The sums of one rank, in the order in which all ranks start them, and the ledger of their handlers."""

    sums: Sequence[Sum]
    ledger: Ledger
    attached: Sequence[DemandGradientHandler]
    """The automatic handlers."""
    planned: Sequence[PlannedGradientHandler]
    """All handlers, automatic and named, whose reductions are in `sums`. The others call collectives themselves."""


def plan_sums(
    model: nn.Module,
    optimizer: Any,
    context: ParallelContext,
    claims: Sequence[Claim],
    *,
    bucket_all: bool = False,
    shards: Shards | None = None,
    touched: Mapping[str, str] | None = None,
    complete: bool = True,
) -> SumPlan:
    """Plan the gradient reductions of this rank's part of a model.

    Args:
        model: The model of this rank.
        optimizer: The optimizer as it was given to `initialize`.
        context: The parallel context; its config (`sync`) and its layout suffice.
        claims: The named handlers and their reductions.
        bucket_all: Put gradients that need no reduction into buckets, too, for a flat optimizer step.
        shards: The parameters whose gradients are sharded (ZeRO 1 and 2).
        touched: {name of a waived parameter: name of the handler that changed its gradient in the probe}.
        complete: Raise for a reduction without a handler. False if some handlers are unknown and may perform the reduction.

    Raises:
        LedgerError: A reduction has no handler or two, or its ranks or its divisor are wrong.
        GradientError: A handler that calls collectives itself reduces a parameter with sharded gradients.
    """
    rank = context.get_global_rank()
    demands = read_demands(model, context.layout, rank)
    covered = [(type(handler).__name__, reduction) for handler, reductions in claims for reduction in reductions]
    given = context.config.get("sync") or {}
    settings = SyncSettings.read(given)
    ledger = match(demands, covered, context.layout, rank, settings.waive, touched or {})
    attached, ledger = attach_automatic(ledger, model, optimizer) if settings.automatic else ([], ledger)
    if complete:
        require_complete(ledger)
    # Handlers that call collectives themselves expect full gradients in `.grad`. Sharded gradients exist as slices only when
    # a handler is called; at stage 2 this is so since the backward pass that made them.
    for handler, reductions in claims if shards is not None else ():
        for reduction in reductions if not isinstance(handler, PlannedGradientHandler) else ():
            for name, parameter in zip(reduction.names, reduction.parameters, strict=True):
                if shards is not None and id(parameter) in shards.labels:
                    raise GradientError(
                        f"{type(handler).__name__} sums {name!r} in handle_gradient(), but ZeRO stages 1 and 2 "
                        "reduce gradients into slices. Declare the reduction in a PlannedGradientHandler, or turn "
                        "zero off.",
                        code="C042",
                    )

    for handler in attached:
        handler.attach(context)
    planned: list[tuple[PlannedGradientHandler, Sequence[Reduction]]] = [
        *((handler, handler.reductions_among(demands)) for handler in attached),
        *((handler, reductions) for handler, reductions in claims if isinstance(handler, PlannedGradientHandler)),
    ]

    # Parameters that need no reduction still get a bucket if a flat optimizer step reads gradients there, or ZeRO assigns each
    # rank a slice of them.
    unsummed = [
        (demand.name, demand.parameter)
        for demand in demands
        if bucket_all or (shards is not None and id(demand.parameter) in shards.labels)
    ]
    # The given options as they are: the options of a handler take their place before they are read.
    options = {key: value for key, value in given.items() if key not in ("waive", "automatic")}
    sums = sums_of(planned, context, options, unsummed, shards)
    return SumPlan(sums, ledger, attached, [handler for handler, _ in planned])
