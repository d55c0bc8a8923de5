"""Records of gradient reductions, and their conversion from the reductions of handlers to the sums that are performed.

- `Demand`: one parameter and its required reductions, by mode (`Owed`).
- `Reduction`: parameters for which a handler declares the same reduction over one mode.
- `Sum`: all reductions of a parameter as one collective over their joint ranks.

`gradients.handler` assigns reductions to handlers; buckets and the synchroniser perform the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from colonnade.config.settings import SyncOptions, half_dtypes
from colonnade.context.layout import Layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError, LedgerError, did_you_mean
from colonnade.parallel.demand import Owed, joint_ranks, owed
from colonnade.parallel.placement import Placement, effective_placement

HALVES = half_dtypes()


Choice = str | Sequence[str] | Callable[[str, nn.Parameter], bool] | None
"""A choice of parameters: None for all, name patterns (`"*.bias"`), or a predicate of name and parameter."""


@dataclass(frozen=True, eq=False)
class Reduction:
    """An all-reduce of the gradients of some parameters over `ranks` (a group of `mode`), divided by `divisor`."""

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    mode: ParallelMode
    ranks: tuple[int, ...]
    divisor: float

    def __str__(self) -> str:
        shown = ", ".join(self.names[:3]) + (f", ... ({len(self.names)})" if len(self.names) > 3 else "")
        return f"sum over {self.mode.name} {list(self.ranks)} / {self.divisor:g}: {shown}"


@dataclass(frozen=True, eq=False)
class Demand:
    """A parameter with its required reductions on this rank."""

    name: str
    parameter: nn.Parameter
    placement: Placement
    owed: tuple[Owed, ...]


@dataclass(frozen=True)
class Sharding:
    """Options of sharded gradients (ZeRO 1 and 2): each rank gets the reduced gradient of its slice of every bucket.

    `ZeroOptimizer.plan_shards` creates it, and `Sum.sharding` carries it to the buckets. The readers are named below; in
    addition, the planner (`proof/planner/planned_sums.py`) reads `keep_full`, `every_pass` and `device`.

    Args:
        keep_full: Each rank has memory for its full gradients and reduces them once per step. False: buckets share two
            staging buffers. Read by `Bucket.keeps_gradients` and `BucketStorage.lay_out`.
        every_pass: Reduce at every backward pass, not once per step. Read by `Bucket.every_pass`, which the synchroniser uses.
        wide: Keep the owned slice of half-precision gradients in fp32. Read by `BucketStorage.lay_out`.
        device: The device of the owned slice; None for the device of the gradients. Read by `BucketStorage.lay_out`.
        give_back: All-gather the reduced gradients, so that every rank has them as `.grad`. Read by `Synchroniser.wait`.
    """

    keep_full: bool = True
    every_pass: bool = False
    wide: bool = False
    device: torch.device | None = None
    give_back: bool = False


@dataclass(frozen=True, eq=False)
class Sum:
    """A reduction that one collective performs: reduced gradient = (sum of the local gradients over `ranks`) / `divisor`.

    Args:
        names: Names of the parameters on this rank. They may differ between ranks: a weight that is tied over pipeline
            stages has another name at each stage.
        parameters: The parameters, in the same order on every rank of `ranks`.
        ranks: Global ranks, this rank among them.
        group: The torch group of exactly these ranks; None if `ranks` is only this rank.
        divisor: Divisor of the sum.
        options: Options of buckets and communication.
        sharding: The options for a result that is sharded over the ranks; None if every rank gets the full result.
        labels: One per parameter, compared between the ranks at start-up.
        between_stages: The ranks are at several pipeline stages, which reach the sum at different times of a step. Such a sum is
            never started early, because a wait in the middle of the step would stall the pipeline.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    ranks: tuple[int, ...]
    group: ProcessGroup | None
    divisor: float
    options: SyncOptions = field(default_factory=SyncOptions)
    sharding: Sharding | None = None
    labels: tuple[str, ...] = ()
    between_stages: bool = False

    @property
    def order(self) -> tuple[Any, ...]:
        """The sort key of this sum.

        All ranks start their sums in ascending order of this key, although each rank has another subset of sums.
        """
        return self.ranks, self.divisor, self.sharding is not None, repr(self.options)


def read_demands(model: nn.Module, layout: Layout, rank: int) -> list[Demand]:
    """The required reductions of every parameter; a parameter with two names is listed once, under its first name."""
    placed = [(name, p, effective_placement(p, layout, rank)) for name, p in model.named_parameters()]
    return [Demand(name, p, placement, owed(layout, placement, rank)) for name, p, placement in placed]


def choose(demands: Iterable[Demand], which: Choice) -> list[Demand]:
    """Select the demands of the parameters that `which` chooses. Raises LedgerError for a pattern that matches no parameter."""
    demands = list(demands)
    if which is None:
        return demands
    if callable(which):
        return [demand for demand in demands if which(demand.name, demand.parameter)]
    patterns = [which] if isinstance(which, str) else list(which)
    names = [demand.name for demand in demands]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise LedgerError(
                f"the pattern {pattern!r} matches none of the {len(names)} parameters.{did_you_mean(pattern, names)}",
                code="C041",
            )
    return [demand for demand in demands if any(fnmatchcase(demand.name, pattern) for pattern in patterns)]


def group_reductions(pairs: Iterable[tuple[Demand, Owed]]) -> list[Reduction]:
    """Merge reductions that have the same mode, ranks and divisor; in the order of their first occurrence."""
    by_factor: dict[Owed, list[Demand]] = {}
    for demand, factor in pairs:
        by_factor.setdefault(factor, []).append(demand)
    reductions = []
    for factor, demands in by_factor.items():
        # Tied parameters have other names, and another position in the model, at each stage; their key is the same everywhere.
        ordered = sorted(demands, key=lambda demand: demand.placement.tie_key)
        names, parameters = tuple(demand.name for demand in ordered), tuple(demand.parameter for demand in ordered)
        reductions.append(Reduction(names, parameters, factor.mode, factor.ranks, factor.divisor))
    return reductions


@dataclass(frozen=True)
class Shards:
    """The parameters with sharded gradients. `labels` has, by id of the parameter, a text that must be the same on all ranks."""

    sharding: Sharding
    labels: Mapping[int, str]
    bucket_mb: float | None = None


Claim = tuple[Any, Sequence[Reduction]]
"""A gradient handler and its reductions."""


def sums_of(
    claims: Iterable[Claim],
    context: ParallelContext,
    options: Mapping[str, Any],
    unsummed: Iterable[tuple[str, nn.Parameter]] = (),
    shards: Shards | None = None,
) -> list[Sum]:
    """Convert the reductions of planned handlers to the sums of this rank, in the order in which all ranks start them; without
    process groups.

    All reductions of a parameter are performed as one sum over their joint ranks, divided by the product of their divisors.

    Args:
        claims: Planned handlers and their reductions.
        context: The parallel context; its layout suffices.
        options: The `sync` section of the config; options of a handler take precedence.
        unsummed: Parameters that need no reduction, but are put into buckets, too.
        shards: The parameters with sharded gradients.

    Raises:
        ConfigError: Two handlers with different options reduce the same parameter, which is one sum.
    """
    layout, rank = context.layout, context.get_global_rank()
    named: dict[int, tuple[str, nn.Parameter]] = {}
    reductions_of: dict[int, list[Reduction]] = {}
    handler_options: dict[int, dict[str, tuple[Any, str]]] = {}  # parameter -> option -> (value, class of the handler)
    for handler, reductions in claims:
        for reduction in reductions:
            for name, parameter in zip(reduction.names, reduction.parameters, strict=True):
                named.setdefault(id(parameter), (name, parameter))
                reductions_of.setdefault(id(parameter), []).append(reduction)
                for option, value in handler.options.items():
                    known = handler_options.setdefault(id(parameter), {})
                    before, by = known.setdefault(option, (value, type(handler).__name__))
                    if before != value:
                        raise ConfigError(
                            f"the gradient handlers {by} and {type(handler).__name__} both reduce {name!r} in one "
                            f"sum, but {by} has {option}={before!r} and {type(handler).__name__} has "
                            f"{option}={value!r}. Give both handlers the same {option}.",
                            code="C003",
                        )
    for name, parameter in unsummed:
        named.setdefault(id(parameter), (name, parameter))

    # Parameters with equal ranks, divisor, options and sharding form one sum, and so share buckets.
    members: dict[tuple[tuple[int, ...], float, SyncOptions, bool], list[int]] = {}
    read: dict[Any, SyncOptions] = {}
    for key, (_, parameter) in named.items():
        given = tuple((option, value) for option, (value, _) in handler_options.get(key, {}).items())
        sharded = shards is not None and key in shards.labels
        if (given, sharded) not in read:
            chosen = SyncOptions.read({**options, **dict(given)})
            if sharded and shards is not None and shards.bucket_mb is not None:
                chosen = replace(chosen, bucket_mb=shards.bucket_mb)
            read[given, sharded] = chosen
        found = reductions_of.get(key, ())
        divisor = prod((reduction.divisor for reduction in found), start=1.0)
        ranks: tuple[int, ...] = (rank,)
        if len(found) == 1:
            # The ranks of the handler: the ledger has compared them with the required ones, unless the parameter is waived.
            (reduction,) = found
            ranks = reduction.ranks
        elif found:
            factors = tuple(Owed(reduction.mode, reduction.ranks, int(reduction.divisor)) for reduction in found)
            ranks = joint_ranks(layout, effective_placement(parameter, layout, rank), factors, rank)
        members.setdefault((ranks, divisor, read[given, sharded], sharded), []).append(key)

    sums = [
        Sum(
            names=tuple(named[key][0] for key in keys),
            parameters=tuple(named[key][1] for key in keys),
            ranks=ranks,
            group=None,
            divisor=divisor,
            options=chosen,
            sharding=shards.sharding if sharded and shards is not None else None,
            labels=tuple(shards.labels[key] for key in keys) if sharded and shards is not None else (),
            between_stages=len({layout.local_rank(ParallelMode.PIPELINE, other) for other in ranks}) > 1,
        )
        for (ranks, divisor, chosen, sharded), keys in members.items()
    ]
    return sorted(sums, key=lambda sum_: sum_.order)


def with_groups(sums: Iterable[Sum], context: ParallelContext) -> list[Sum]:
    """Copies of the sums that have their process groups. Collective over the world, because missing groups are created."""
    sums = list(sums)
    # Creating a group is collective over the world, so a rank without sums calls it, too.
    context.ensure_groups({sum_.ranks for sum_ in sums if len(sum_.ranks) > 1})
    return [replace(sum_, group=context.group_of_ranks(sum_.ranks)) if len(sum_.ranks) > 1 else sum_ for sum_ in sums]
