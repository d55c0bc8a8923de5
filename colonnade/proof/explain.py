"""explain: every class of parameters of a config, how it lies, which sums it owes, who does them and why.

Each kind of rank is prepared by the functions that `initialize` uses (`engine.prepare`, `gradients.sum_plan`), on a model without
memory. No process is started and no group is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from colonnade.config import Config
from colonnade.config.settings import ZeroSettings
from colonnade.context.layout import Layout
from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.prepare import prepare_optimizer, prepare_sums, read_numerics
from colonnade.errors import ColonnadeError, ConfigError, RegistryError, did_you_mean
from colonnade.gradients.handler import AUTOMATIC, ZeROGradientHandler
from colonnade.gradients.ledger import Ledger, LedgerRow, match
from colonnade.gradients.sum_plan import plan_sums
from colonnade.gradients.sums import read_demands
from colonnade.optim.zero.formula import shard_dim
from colonnade.optim.zero.fsdp import left_whole, replica_mode, shard_modes_of
from colonnade.parallel.demand import check_same_data, holding, owed
from colonnade.parallel.placement import Placement, Replicate, Shard, Spec, Tied, place, placement_of
from colonnade.parallel.split import build_schedule
from colonnade.proof.roles import BuildModel, Role, ranks_of_stage, roles
from colonnade.texts import pattern_of

Groups = tuple[tuple[int, ...], ...]
"""Sets of ranks."""

RANKS_SHOWN = 8


@dataclass(frozen=True)
class SumOf:
    """One sum over ranks that the gradients of a class owe, who does it, and why so."""

    mode: str
    groups: Groups
    divisor: float
    why_divided: str
    handler: str
    why_handled: str


@dataclass(frozen=True)
class ParameterClass:
    """Parameters that lie alike and are handled alike. `names`: patterns, and how many parameters each stands for.

    `holders`: the sets of ranks that hold the same elements, which must start equal; each counts 1/`share` of a norm.
    `writers`: the ranks that write them into a checkpoint.
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
    """A world in words. `problems`: what `initialize` would refuse. Of a large world some groups are left out."""

    world_size: int
    axes: dict[str, int]
    modes: dict[str, str]
    classes: tuple[ParameterClass, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass
class _Found:
    """What one class has, while roles are looked at."""

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
    """Explain the config on so many ranks: for the parameters of `model`, or for one of each kind of placement.

    `param` keeps parameters of these names only, as a pattern. `context` is each kind of rank in turn, as long as its
    model is built; by default the global one, which a model's code may ask. `optimizer` takes parameters: handlers may need it,
    and one that sums gradients itself has a handler of its own.
    """
    if context is None:
        from colonnade.core import global_context  # what a model's own code asks

        context = global_context
    layout = build_layout(config, world_size)
    _, zero = read_numerics(config)
    found: dict[Any, _Found] = {}
    names: set[str] = set()
    reasons: dict[str, str] = {}
    problems: dict[str, None] = {}
    notes: dict[str, None] = dict.fromkeys(notes_of(config, zero))
    for role in roles(config, world_size, model, context):
        problems |= _schedule_problem(context) | _mode_problem(role, layout)
        sharded = _cut_by_fsdp(role.model, layout, role.rank, zero)
        ledger = _ledger(role, optimizer, context, zero, reasons, problems, notes)
        names.update(name for name, _ in role.model.named_parameters())
        _collect(role, layout, ledger, sharded, param, found)
    if param is not None and not found:
        raise ConfigError(f"--param {param!r} matches none of the {len(names)} parameters.{did_you_mean(param, names)}")
    classes = tuple(_described(one, layout, reasons) for one in found.values())
    return Explanation(world_size, _axes(layout), _modes(layout), classes, tuple(notes), tuple(problems))


def _mode_problem(role: Role, layout: Layout) -> dict[str, None]:
    """The first parameter on a mode whose groups join ranks that see other data, if there is one."""
    try:
        for name, parameter in role.model.named_parameters():
            check_same_data(layout, placement_of(parameter), role.rank, name)
    except ColonnadeError as error:
        return {str(error): None}
    return {}


# --- What is looked at in a role ------------------------------------------------------------------


def _collect(
    role: Role,
    layout: Layout,
    ledger: Ledger,
    sharded: dict[str, LedgerRow],
    param: str | None,
    found: dict[Any, _Found],
) -> None:
    rows: dict[str, list[LedgerRow]] = {}
    for row in ledger.rows:
        rows.setdefault(row.parameter, []).append(row)
    for name, parameter in role.model.named_parameters():
        if param is not None and not fnmatchcase(name, param):
            continue
        placement = placement_of(parameter)
        mine = [*([sharded[name]] if name in sharded else []), *rows.get(name, [])]
        done = tuple((row.mode, row.divisor, row.done_by, row.waived) for row in mine)
        inside = tuple(mode for mode in layout.modes if layout.has(mode, role.rank))
        key = (placement.key[0], done, not parameter.requires_grad, inside)
        one = found.setdefault(key, _Found(placement, mine, role, not parameter.requires_grad))
        pattern = pattern_of(name)
        one.names[pattern] = one.names.get(pattern, 0) + 1
        one.elements += parameter.numel()
        one.stages.add(role.stage)


def _ledger(
    role: Role,
    optimizer: Any,
    context: ParallelContext,
    zero: ZeroSettings,
    reasons: dict[str, str],
    problems: dict[str, None],
    notes: dict[str, None],
) -> Ledger:
    """As `initialize` fills it, as far as that can be without other ranks."""
    config, unknown = context.config, []

    def failed(name: str, error: ColonnadeError) -> None:
        if isinstance(error, RegistryError):
            problems[str(error)] = None
            return
        notes[f"{name} (named in the config) cannot be planned here: {error}"] = (
            None  # it may need an optimizer, or a group
        )
        unknown.append(name)

    try:
        if optimizer is not None:
            optimizer = prepare_optimizer(optimizer, role.model, context)
        sums = prepare_sums(role.model, optimizer, context, zero, planned_on="cpu", failed=failed)
        named = config.get("gradient_handler") or config.get("gradient_handlers") or ()
        asked = [entry if isinstance(entry, str) else entry["type"] for entry in named]
        reasons |= dict.fromkeys(asked, "named in the config")
        for handler, said in sums.handlers:
            name = type(handler).__name__
            if name not in asked and isinstance(handler, ZeROGradientHandler):
                reasons[name] = f"attached by itself: {handler.reason}"
            if said is None:
                unknown.append(name)
                notes[_by_trial(name)] = None
        claims = [(handler, said) for handler, said in sums.handlers if said is not None]
        # What nobody does here may be done by a handler that only a run finds out about.
        found = plan_sums(
            role.model, sums.user_optimizer, context, claims, config.get("sync") or {},
            bucket_all=sums.bucket_all, shards=sums.shards, complete=not unknown,
        )  # fmt: skip
    except ColonnadeError as error:
        problems[str(error)] = None
        return match(read_demands(role.model, context.layout, role.rank), [], context.layout, role.rank)
    reasons |= {type(one).__name__: f"attached by itself: {one.reason}" for one in found.attached}
    return found.ledger


def _schedule_problem(context: ParallelContext) -> dict[str, None]:
    try:
        build_schedule(context)
    except ColonnadeError as error:
        return {str(error): None}
    return {}


def _by_trial(name: str) -> str:
    return (
        f"{name} (named in the config) sums by hand: what it does is found by a trial run in `initialize`, so it cannot be "
        f"said without processes. What it does is its, and the handlers below do the rest"
    )


def _cut_by_fsdp(model: nn.Module, layout: Layout, rank: int, zero: ZeroSettings) -> dict[str, LedgerRow]:
    """At stage 3: place parameters as FSDP2 will cut them; returns what it reduces, by parameter."""
    if zero.stage != 3:
        return {}
    axis = replica_mode(layout, zero.replicate)
    whole = left_whole(model, list(model) if isinstance(model, nn.ModuleList) else [model])
    found = {}
    for name, parameter in model.named_parameters():
        cut = shard_modes_of(parameter, layout, rank, axis) if id(parameter) not in whole else None
        if cut is None:
            continue
        *over, mode = cut.modes
        ranks = tuple(layout.group_of(mode, rank))
        before = placement_of(parameter)
        modes: dict[ParallelMode, Spec] = {
            **before.modes,
            mode: Shard(shard_dim(parameter.shape, len(ranks)), "nothing"),
        }
        for other in {*over, ParallelMode.DATA} - {mode}:
            modes[other] = Replicate("nothing")
        found[name] = LedgerRow(name, mode.name, ranks, cut.divisor, _FSDP)
        place(parameter, modes, before.shape)
    return found


_FSDP = "FSDP2"


# --- From what was found to a class of parameters -------------------------------------------------


def _described(one: _Found, layout: Layout, reasons: dict[str, str]) -> ParameterClass:
    placement, rank, stages = one.placement, one.role.rank, tuple(sorted(one.stages))
    inside = [mode for mode in layout.modes if layout.has(mode, rank)]
    ranks = [r for r in ranks_of_stage(layout, stages) if all(layout.has(mode, r) for mode in inside)]
    holders = _distinct(ranks, lambda each: holding(layout, placement, each).ranks)
    return ParameterClass(
        names=one.names,
        elements=one.elements,
        stages=stages,
        placement=str(placement),
        lies=tuple(lies_on(layout, placement, rank)),
        sums=tuple(_sum(row, placement, layout, ranks, reasons) for row in one.rows),
        share=holding(layout, placement, rank).count,
        holders=holders,
        kept=kept_of(layout, placement, rank),
        writers=tuple(sorted({group[0] for group in holders})),
        frozen=one.frozen,
    )


def _sum(row: LedgerRow, placement: Placement, layout: Layout, ranks: Sequence[int], reasons: dict[str, str]) -> SumOf:
    mode = next(each for each in layout.modes if each.name == row.mode)
    handler = row.done_by or ("nobody (waived)" if row.waived else "nobody")
    why = reasons.get(handler, "named in sync.waive" if row.waived else "no handler does it")
    if any(kind.__name__ == handler and kind.when is not None and mode not in kind.when for kind in AUTOMATIC):
        why += f"; with it, what is owed over {row.mode}"
    if handler == _FSDP:
        groups = _distinct(ranks, lambda each: tuple(layout.group_of(mode, each)))
        why = "zero stage 3: FSDP2 cuts the parameter over these ranks and reduces its gradient itself"
    else:
        groups = _distinct(ranks, lambda each: _owed_over(layout, placement, each, mode))
    return SumOf(row.mode, groups, row.divisor, why_divided(row), handler, why)


def _axes(layout: Layout) -> dict[str, int]:
    return {axis.name: axis.size for axis in layout.axes if axis.size > 1}


def _modes(layout: Layout) -> dict[str, str]:
    """Every mode with groups of several ranks: the groups, and what data its ranks see."""
    data = {axis.mode: axis.data for axis in layout.axes}
    found = {}
    for mode in layout.modes:
        groups = layout.groups(mode)
        if any(len(group) > 1 for group in groups[:RANKS_SHOWN]):
            sees = "" if mode is ParallelMode.GLOBAL else f"; {data.get(mode, mode.data)} data"
            found[mode.name] = groups_text(tuple(map(tuple, groups[:RANKS_SHOWN])), len(groups)) + sees
    return found


def _owed_over(layout: Layout, placement: Placement, rank: int, mode: ParallelMode) -> tuple[int, ...]:
    return next((factor.ranks for factor in owed(layout, placement, rank) if factor.mode is mode), ())


def _distinct(ranks: Iterable[int], group_of: Callable[[int], tuple[int, ...]]) -> Groups:
    """The groups that these ranks are in; of each, one rank is asked."""
    seen: set[int] = set()
    found = []
    for rank in ranks:
        group = group_of(rank) if rank not in seen else ()
        if group:
            found.append(group)
            seen.update(group)
    return tuple(sorted(found))


# --- Words: how a placement lies, why a sum is divided so, what a checkpoint keeps, groups of ranks ---


def lies_on(layout: Layout, placement: Placement, rank: int) -> list[str]:
    """A line for each mode that it is placed on, and each axis along which ranks hold it whole."""
    found = []
    for mode, spec in placement.modes.items():
        size = len(layout.group_of(mode, rank))
        if size > 1 or isinstance(spec, Tied):
            found.append(f"{mode.name}: {_how(spec, size)}")
    at, holders = layout.coordinates(rank), set(holding(layout, placement, rank).ranks)
    placed = {mode.name for mode in placement.modes}
    for axis in layout.axes:
        along = [layout.rank_at(**{**at, axis.name: place}) for place in range(axis.size)]
        count = len(holders.intersection(along))
        if count > 1 and axis.mode.name not in placed:
            part = "" if count == axis.size else f", each part on {count} of {axis.size} ranks"
            found.append(f"{axis.mode.name}: whole{part}")
    return found


def _how(spec: Spec, size: int) -> str:
    if isinstance(spec, Shard):
        packed = f", {len(spec.sections)} sections" if spec.sections else ""
        return f"cut along dimension {spec.dim} in {size} parts{packed}"
    if isinstance(spec, Tied):
        return f"one weight at stages {', '.join(map(str, spec.stages))} (key {spec.key!r})"
    return {
        "sum": "whole, and each rank has a part of its gradient",
        "nothing": "whole, and its gradient is final",
        "auto": "whole",
    }[spec.owes]


def why_divided(row: LedgerRow) -> str:
    """The reason of a divisor."""
    count = len(row.ranks)
    if row.divisor == 1:
        return "not divided: the ranks see the same data, and each has a part of the gradient"
    if row.divisor == count:
        return f"its {count} ranks saw distinct data"
    if count == 1:
        return f"{row.divisor:g} ranks saw distinct data; this one alone holds the part, and its gradient has what they sent it"
    return f"{row.divisor:g} ranks saw distinct data; the {count} of the sum have in their gradients what the others sent them"


def kept_of(layout: Layout, placement: Placement, rank: int) -> str:
    """What a checkpoint keeps of it."""
    cuts = [
        f"dimension {shard.dim} in {len(layout.group_of(mode, rank))}"
        for mode, shard in placement.shards.items()
        if len(layout.group_of(mode, rank)) > 1
    ]
    return f"slices of the whole tensor ({', '.join(cuts)}), each once" if cuts else "the whole tensor, once"


def notes_of(config: Config, zero: ZeroSettings) -> list[str]:
    """What the config does to all gradients."""
    found = []
    clip = config.get("clip_grad_norm")
    if isinstance(clip, dict):
        clip = clip.get("max_norm")
    if clip:
        found.append(f"clipped to a global norm of {clip:g}: one sum over the world, after all sums of gradients")
    accumulation = config.get("gradient_accumulation") or 1
    if accumulation > 1:
        found.append(
            f"each loss is divided by gradient_accumulation = {accumulation}; gradients are summed at the last pass"
        )
    schedule = config.get("schedule") if isinstance(config.get("schedule"), dict) else {}
    count = (schedule or {}).get("num_microbatches") or config.get("num_microbatches")
    if count:
        found.append(f"a step has {count} micro-batches, and their losses are averaged by count")
    if zero.stage in (1, 2):
        kept = "gradients and optimizer state" if zero.stage == 2 else "optimizer state"
        found.append(
            f"zero stage {zero.stage}: each rank of a sum keeps its slice of {kept}, steps on it and writes it to a checkpoint; "
            f"parameters are gathered after the step"
        )
    return found


def groups_text(groups: Groups, count: int | None = None) -> str:
    """Groups of ranks for people; long lists are cut."""
    shown = " ".join(_ranks_text(group) for group in groups[:4])
    left = (count or len(groups)) - min(len(groups), 4)
    return shown + (f" and {left} more groups" if left > 0 else "")


def _ranks_text(ranks: tuple[int, ...]) -> str:
    return (
        str(list(ranks))
        if len(ranks) <= RANKS_SHOWN
        else f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}] ({len(ranks)} ranks)"
    )
