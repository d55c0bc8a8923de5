"""`colonnade explain`: for each class of parameters, its sharding and the reductions of its gradients, with reasons.

Each kind of rank is prepared with the functions that `initialize` uses (`engine.prepare`, `gradients.handler`), on a model
on the meta device. No process is started and no process group is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from colonnade.config import Config
from colonnade.config.settings import ZeroSettings
from colonnade.context.layout import Layout
from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.prepare import prepare_optimizer, prepare_sums, read_numerics
from colonnade.errors import ColonnadeError, ConfigError, RegistryError, did_you_mean
from colonnade.gradients.handler import AUTOMATIC, ZeROGradientHandler, plan_sums
from colonnade.gradients.ledger import Ledger, LedgerRow, match
from colonnade.gradients.sums import read_demands
from colonnade.optim.zero.fsdp import place_as_sharded
from colonnade.parallel.demand import check_same_data, holding, owed
from colonnade.parallel.placement import Placement, Shard, Tied, placement_of
from colonnade.parallel.split import build_schedule
from colonnade.proof.roles import BuildModel, Role, ranks_of_stage, roles
from colonnade.texts import pattern_of

Groups = tuple[tuple[int, ...], ...]
"""Sets of ranks."""

RANKS_SHOWN = 8


@dataclass(frozen=True)
class SumOf:
    """One required gradient reduction of a `ParameterClass`, with the handler that does it."""

    mode: str
    groups: Groups
    divisor: float
    why_divided: str
    handler: str
    why_handled: str


@dataclass(frozen=True)
class ParameterClass:
    """Parameters with the same placement and the same reductions.

    Attributes:
        names: Name patterns, with the number of matching parameters.
        lies: One line for each mode over which the parameters are sharded or replicated.
        share: The number of replicas of each element; a rank counts 1/`share` of its elements in the gradient norm.
        holders: The replica groups: sets of ranks that store the same elements, and must start with the same values.
        kept: The part of each parameter that a checkpoint contains.
        writers: The ranks that write the parameters to a checkpoint.
    """

    names: dict[str, int]
    elements: int
    stages: tuple[int, ...]
    placement: str
    lies: tuple[str, ...]
    sums: tuple[SumOf, ...]
    share: int
    holders: Groups
    kept: str
    writers: tuple[int, ...]
    frozen: bool = False


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`.

    `problems` are the errors that `initialize` would raise. For large worlds, some groups are omitted.
    """

    world_size: int
    axes: dict[str, int]
    modes: dict[str, str]
    classes: tuple[ParameterClass, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


@dataclass
class _Found:
    """A class of parameters, as far as it is known."""

    placement: Placement
    rows: list[LedgerRow]
    role: Role
    frozen: bool
    names: dict[str, int] = field(default_factory=dict)
    elements: int = 0
    stages: set[int] = field(default_factory=set)


def explain(
    config: Config,
    world_size: int,
    model: BuildModel | None = None,
    param: str | None = None,
    context: ParallelContext | None = None,
    optimizer: Callable[..., Any] | None = None,
) -> Explanation:
    """Explain a config: how each class of parameters is sharded, which reductions its gradients need, and who does them.

    Args:
        config: The config of the run.
        world_size: The number of ranks.
        model: Builds the model; without it, one parameter of each kind of placement is explained.
        param: A pattern; only parameters whose names match are explained.
        context: Simulates each kind of rank in turn while its model is built. Default: the global context, which the
            model's code may ask.
        optimizer: Makes an optimizer of parameters. Handlers may need one, and an optimizer that sums gradients itself
            has a handler of its own.

    Raises:
        ConfigError: `param` matches no parameter.
    """
    if context is None:
        from colonnade.core import global_context

        context = global_context
    layout = build_layout(config, world_size)
    _, zero = read_numerics(config)
    found: dict[Any, _Found] = {}
    all_names: set[str] = set()
    reasons: dict[str, str] = {}
    problems: dict[str, None] = {}
    notes: dict[str, None] = dict.fromkeys(notes_of(config, zero))
    for role in roles(config, world_size, model, context):
        # Errors that `initialize` would raise are listed, so that the rest can still be explained.
        try:
            build_schedule(context)
        except ColonnadeError as error:
            problems[str(error)] = None
        try:
            for name, parameter in role.model.named_parameters():
                check_same_data(layout, placement_of(parameter), role.rank, name)
        except ColonnadeError as error:
            problems[str(error)] = None

        # ZeRO stage 3 comes before the ledger, as in `initialize`: FSDP2 reduces the gradients of the parameters that it
        # shards, so that our handlers have nothing to do for these.
        rows: dict[str, list[LedgerRow]] = {}
        sharded = place_as_sharded(role.model, layout, role.rank, zero) if zero.stage == 3 else {}
        for name, shard_modes in sharded.items():
            ranks = tuple(layout.group_of(shard_modes.sharded_over, role.rank))
            rows[name] = [LedgerRow(name, shard_modes.sharded_over.name, ranks, shard_modes.divisor, _FSDP)]
        for row in _ledger(role, optimizer, context, zero, reasons, problems, notes).rows:
            rows.setdefault(row.parameter, []).append(row)

        # Parameters of one placement, with the same reductions in the same modes, are one class.
        inside = tuple(mode for mode in layout.modes if layout.has(mode, role.rank))
        for name, parameter in role.model.named_parameters():
            all_names.add(name)
            if param is not None and not fnmatchcase(name, param):
                continue
            placement, own = placement_of(parameter), rows.get(name, [])
            done = tuple((row.mode, row.divisor, row.done_by, row.waived) for row in own)
            key = (placement.key[0], done, not parameter.requires_grad, inside)
            known = found.setdefault(key, _Found(placement, own, role, not parameter.requires_grad))
            pattern = pattern_of(name)
            known.names[pattern] = known.names.get(pattern, 0) + 1
            known.elements += parameter.numel()
            known.stages.add(role.stage)
    if param is not None and not found:
        raise ConfigError(
            f"--param {param!r} matches none of the {len(all_names)} parameters.{did_you_mean(param, all_names)}"
        )
    classes = tuple(_described(known, layout, reasons) for known in found.values())
    axes = {axis.name: axis.size for axis in layout.axes if axis.size > 1}
    return Explanation(world_size, axes, _modes(layout), classes, tuple(notes), tuple(problems))


_FSDP = "FSDP2"


def _ledger(
    role: Role,
    optimizer: Any,
    context: ParallelContext,
    zero: ZeroSettings,
    reasons: dict[str, str],
    problems: dict[str, None],
    notes: dict[str, None],
) -> Ledger:
    """The ledger of a rank as `initialize` fills it, as far as that is possible without other ranks."""
    config, unknown = context.config, []

    def failed(name: str, error: ColonnadeError) -> None:
        if isinstance(error, RegistryError):
            problems[str(error)] = None
            return
        # A handler may need an optimizer or a process group, which do not exist here. That is no problem in a run.
        notes[f"{name} (named in the config) cannot be planned here: {error}"] = None
        unknown.append(name)

    try:
        if optimizer is not None:
            optimizer = prepare_optimizer(optimizer, role.model, context)
        sums = prepare_sums(role.model, optimizer, context, zero, planned_on="cpu", failed=failed)
        named = config.get("gradient_handler") or config.get("gradient_handlers") or ()
        asked = [entry if isinstance(entry, str) else entry["type"] for entry in named]
        reasons |= dict.fromkeys(asked, "named in the config")
        for handler, planned in sums.handlers:
            name = type(handler).__name__
            if name not in asked and isinstance(handler, ZeROGradientHandler):
                reasons[name] = f"attached automatically: {handler.reason}"
            if planned is None:
                unknown.append(name)
                notes[
                    f"{name} (named in the config) declares no reductions(): `initialize` finds them with probe gradients, which "
                    f"needs processes. The handlers below perform all other reductions"
                ] = None
        claims = [(handler, planned) for handler, planned in sums.handlers if planned is not None]
        # If a handler is unknown, the ledger may be incomplete: that handler may do the reductions that are open here.
        found = plan_sums(
            role.model, sums.user_optimizer, context, claims,
            bucket_all=sums.bucket_all, shards=sums.shards, complete=not unknown,
        )  # fmt: skip
    except ColonnadeError as error:
        problems[str(error)] = None
        return match(read_demands(role.model, context.layout, role.rank), [], context.layout, role.rank)
    reasons |= {type(handler).__name__: f"attached automatically: {handler.reason}" for handler in found.attached}
    return found.ledger


# --- Classes of parameters ---


def _described(known: _Found, layout: Layout, reasons: dict[str, str]) -> ParameterClass:
    placement, rank, stages = known.placement, known.role.rank, tuple(sorted(known.stages))
    # The ranks of the same kind: those of the same stages that are in the same groups.
    inside = [mode for mode in layout.modes if layout.has(mode, rank)]
    ranks = [r for r in ranks_of_stage(layout, stages) if all(layout.has(mode, r) for mode in inside)]
    holders = _distinct(ranks, lambda r: holding(layout, placement, r).ranks)
    return ParameterClass(
        names=known.names,
        elements=known.elements,
        stages=stages,
        placement=str(placement),
        lies=tuple(placement_lines(layout, placement, rank)),
        sums=tuple(_sum(row, placement, layout, ranks, reasons) for row in known.rows),
        share=holding(layout, placement, rank).count,
        holders=holders,
        kept=kept_of(layout, placement, rank),
        writers=tuple(sorted({group[0] for group in holders})),
        frozen=known.frozen,
    )


def _sum(row: LedgerRow, placement: Placement, layout: Layout, ranks: Sequence[int], reasons: dict[str, str]) -> SumOf:
    mode = next(mode for mode in layout.modes if mode.name == row.mode)
    handler = row.done_by or ("nobody (waived)" if row.waived else "nobody")
    why = reasons.get(handler, "named in sync.waive" if row.waived else "no handler does it")
    if any(kind.__name__ == handler and kind.when is not None and mode not in kind.when for kind in AUTOMATIC):
        why += f"; it also does the reductions over {row.mode}"
    if handler == _FSDP:
        # A sharded parameter needs no reduction by a handler any more, so its groups are those of the mode.
        groups = _distinct(ranks, lambda r: tuple(layout.group_of(mode, r)))
        why = "ZeRO stage 3: FSDP2 shards the parameter over these ranks and reduces its gradient itself"
    else:

        def reduced_over(rank: int) -> tuple[int, ...]:
            return next((factor.ranks for factor in owed(layout, placement, rank) if factor.mode is mode), ())

        groups = _distinct(ranks, reduced_over)
    return SumOf(row.mode, groups, row.divisor, why_divided(row), handler, why)


def _modes(layout: Layout) -> dict[str, str]:
    """Every mode with groups of several ranks: the groups, and whether their ranks see the same data."""
    data = {axis.mode: axis.data for axis in layout.axes}
    found = {}
    for mode in layout.modes:
        groups = layout.groups(mode)
        if any(len(group) > 1 for group in groups[:RANKS_SHOWN]):
            sees = "" if mode is ParallelMode.GLOBAL else f"; {data.get(mode, mode.data)} data"
            found[mode.name] = groups_text(tuple(map(tuple, groups[:RANKS_SHOWN])), len(groups)) + sees
    return found


def _distinct(ranks: Iterable[int], group_of: Callable[[int], tuple[int, ...]]) -> Groups:
    """The groups that these ranks are in. `group_of` is called for one rank of each group."""
    seen: set[int] = set()
    found = []
    for rank in ranks:
        group = group_of(rank) if rank not in seen else ()
        if group:
            found.append(group)
            seen.update(group)
    return tuple(sorted(found))


# --- Words: placements, divisors, checkpoints, groups of ranks ---


def placement_lines(layout: Layout, placement: Placement, rank: int) -> list[str]:
    """Describe a placement: one line for each mode, and for each axis over which the parameters are replicated."""
    replicated = {
        "sum": "replicated, and each rank has a partial gradient",
        "nothing": "replicated, and the gradient is final",
        "auto": "replicated",
    }
    found = []
    for mode, spec in placement.modes.items():
        size = len(layout.group_of(mode, rank))
        if isinstance(spec, Tied):
            how = f"one weight at stages {', '.join(map(str, spec.stages))} (key {spec.key!r})"
        elif isinstance(spec, Shard):
            sections = f", {len(spec.sections)} sections" if spec.sections else ""
            how = f"sharded along dimension {spec.dim} in {size} shards{sections}"
        else:
            how = replicated[spec.owes]
        if size > 1 or isinstance(spec, Tied):
            found.append(f"{mode.name}: {how}")
    at, holders = layout.coordinates(rank), set(holding(layout, placement, rank).ranks)
    placed = {mode.name for mode in placement.modes}
    for axis in layout.axes:
        along = [layout.rank_at(**{**at, axis.name: place}) for place in range(axis.size)]
        count = len(holders.intersection(along))
        if count > 1 and axis.mode.name not in placed:
            some = "" if count == axis.size else f", each element on {count} of {axis.size} ranks"
            found.append(f"{axis.mode.name}: replicated{some}")
    return found


def why_divided(row: LedgerRow) -> str:
    """Return the reason for the divisor of a ledger row."""
    count = len(row.ranks)
    if row.divisor == 1:
        return "not divided: the ranks see the same data, and each has a partial gradient"
    if row.divisor == count:
        return f"its {count} ranks saw distinct data"
    if count == 1:
        return f"{row.divisor:g} ranks saw distinct data; only this rank stores the shard, and its gradient covers the data of all of them"
    return f"{row.divisor:g} ranks saw distinct data; the gradients of these {count} ranks cover all of it"


def kept_of(layout: Layout, placement: Placement, rank: int) -> str:
    """Describe the part of a tensor that a checkpoint contains."""
    cuts = [
        f"dimension {shard.dim} in {len(layout.group_of(mode, rank))}"
        for mode, shard in placement.shards.items()
        if len(layout.group_of(mode, rank)) > 1
    ]
    return f"slices of the full tensor ({', '.join(cuts)}), each once" if cuts else "the full tensor, once"


def notes_of(config: Config, zero: ZeroSettings) -> list[str]:
    """Return notes on config settings that affect all gradients."""
    found = []
    clip = config.get("clip_grad_norm")
    if isinstance(clip, dict):
        clip = clip.get("max_norm")
    if clip:
        found.append(
            f"clipped to a global norm of {clip:g}: one reduction over the world, after all gradient reductions"
        )
    accumulation = config.get("gradient_accumulation") or 1
    if accumulation > 1:
        found.append(
            f"each loss is divided by gradient_accumulation = {accumulation}; gradients are reduced in the last pass"
        )
    schedule = config.get("schedule") if isinstance(config.get("schedule"), dict) else {}
    count = (schedule or {}).get("num_microbatches") or config.get("num_microbatches")
    if count:
        found.append(f"a step has {count} micro-batches, and their losses are averaged by count")
    if zero.stage in (1, 2):
        kept = "gradients and optimizer state" if zero.stage == 2 else "optimizer state"
        found.append(
            f"ZeRO stage {zero.stage}: each rank of a reduction keeps its slice of {kept}, updates it and writes it to a "
            f"checkpoint; parameters are all-gathered after the step"
        )
    return found


def groups_text(groups: Groups, count: int | None = None) -> str:
    """Format groups of ranks; long lists are shortened."""

    def ranks_text(ranks: tuple[int, ...]) -> str:
        if len(ranks) <= RANKS_SHOWN:
            return str(list(ranks))
        return f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}] ({len(ranks)} ranks)"

    shown = " ".join(map(ranks_text, groups[:4]))
    left = (count or len(groups)) - min(len(groups), 4)
    return shown + (f" and {left} more groups" if left > 0 else "")
