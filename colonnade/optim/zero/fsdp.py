"""ZeRO stage 3: parameters sharded too, by torch's own FSDP2, each over the ranks that hold it and see distinct data.

`shard_model` decides three things and leaves the rest to `fully_shard`:

- over which ranks each parameter is sharded (`shard_modes_of`): over data for most, over the expert-data twin for experts,
  whose gradients are divided by all ranks that sent tokens; not at all where FSDP2 cannot (`left_whole`);
- which modules are units, gathered and given back as one (`chosen_modules`): the blocks of a model, and experts apart;
- in which dtypes shards are gathered and gradients reduced.

FSDP2 sums the gradients of what it shards. Parameters that are left whole are summed by our handlers. Placements on other
modes (tensor, pipeline, experts) are carried over to the shards, so that norm, ledger and checkpoint read them as ever.
That all ranks run the same units in the same order is checked in `colonnade.optim.zero.fsdp_checks`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colonnade.comm.messages import agreed_errors, gather_json
from colonnade.config.settings import ZeroSettings
from colonnade.context.layout import Layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError, PlacementError, did_you_mean, listed
from colonnade.gradients.sums import HALVES
from colonnade.logging import get_dist_logger
from colonnade.optim.zero.formula import make_fp32, shard_dim
from colonnade.optim.zero.fsdp_checks import (
    ForwardGuard,
    Member,
    RunOrder,
    Unit,
    WatchedGather,
    WatchedReduce,
    check_optimizer,
)
from colonnade.parallel.demand import owed
from colonnade.parallel.dtensor import as_dtensor
from colonnade.parallel.placement import Replicate, Shard, Spec, copy_placement, is_dtensor, place, placement_of


def shard_model(model: nn.Module, context: ParallelContext, settings: ZeroSettings) -> ShardedModel:
    """Apply FSDP2 to all of a model that is not sharded by it yet. Collective over the world."""
    old = {name: p for name, p in model.named_parameters() if not is_dtensor(p)}
    roots = list(model) if isinstance(model, nn.ModuleList) else [model]
    with agreed_errors(context.device):
        shard_modes = shard_modes_by_parameter(model, context.layout, context.get_global_rank(), settings)
        between = shards_between_hosts(context.layout, settings.replicate, os.environ.get("LOCAL_WORLD_SIZE"))
        if between and not context.is_simulated:
            get_dist_logger().warning(between, ranks=[0])

        # `fully_shard` takes what is not in a unit yet, so inner modules come first: experts, which are sharded over other ranks,
        # then the blocks, and the root takes the rest. The root is a unit even if nothing is left for it: it is what lets units
        # gather ahead of each other.
        units = _Units(model, shard_modes, context, settings)
        for root in roots:
            chosen, usual = chosen_modules(root, settings.wrap), _usual_modes(shard_modes, root)
            for module in [*_sharded_apart(root, shard_modes, usual), *chosen]:
                units.shard(module, root)
            units.shard(root, root, usual)
            ours = [module for module in root.modules() if module in units.done]
            _prefetch(ours, settings.prefetch)
            if root in units.done:
                units.guards.append(ForwardGuard(root, ours))

    # FSDP2 has made new parameters, which know nothing of the old ones' placements.
    sharding = ShardedModel(old, model, units)
    for name, parameter in model.named_parameters():
        if name in old and is_dtensor(parameter):
            _keep_placement(old[name], parameter, shard_modes[id(old[name])])
    if not context.is_simulated:
        units.watch(old)
    return sharding


class ShardedModel:
    """What `shard_model` has done: the new parameter for each old one, and what stands guard over both."""

    def __init__(self, old: Mapping[str, nn.Parameter], model: nn.Module, units: _Units) -> None:
        self._model, self._units = model, units
        self.units = len(units.done)
        new = dict(model.named_parameters())
        self._new = {id(parameter): new[name] for name, parameter in old.items()}
        self._kept = list(old.values())  # as long as this lives, no other tensor gets one of these ids
        self.whole = [name for name in old if not is_dtensor(new[name])]

    def carry_over(self, optimizer: Any) -> None:
        """Make an optimizer of the old parameters one of the new; state that it has already is cut as they are."""
        for group in optimizer.param_groups:
            group["params"] = [self._new.get(id(parameter), parameter) for parameter in group["params"]]
        for parameter in [p for p in optimizer.state if id(p) in self._new]:
            new = self._new[id(parameter)]
            held = optimizer.state.pop(parameter)
            optimizer.state[new] = {name: _cut_state(value, parameter, new, name) for name, value in held.items()}

    def guard(self, optimizer: Any) -> None:
        """Try the optimizer on shards, and have the ranks compare what they ran before each of its steps."""
        with agreed_errors(self._units.context.device):
            for mesh in self._units.meshes:
                check_optimizer(optimizer, mesh)
        _step_kinds_apart(optimizer)
        order, guards = self._units.order, self._units.guards
        self._new, self._kept = {}, []  # the whole parameters go now

        # Before weights change: all ranks have issued the same collectives, and nothing is gathered from the old weights.
        def before_step(*_: Any) -> None:
            if order is not None:
                order.step()
            for guard in guards:
                guard.give_back()

        if isinstance(optimizer, Optimizer):
            optimizer.register_step_pre_hook(before_step)
            return
        step = optimizer.step

        def checked_step(*args: Any, **kwargs: Any) -> Any:
            before_step()
            return step(*args, **kwargs)

        optimizer.step = checked_step


class _Units:
    """Calls `fully_shard`, each parameter once.

    A module that shares a parameter with one outside is no unit: it belongs to the innermost one around all who share.
    """

    def __init__(
        self,
        model: nn.Module,
        shard_modes: Mapping[int, ShardModes | None],
        context: ParallelContext,
        settings: ZeroSettings,
    ) -> None:
        self._model, self._shard_modes, self.context, self._settings = model, shard_modes, context, settings
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._meshes: dict[tuple[ParallelMode, ...], Any] = {}
        self._taken: set[int] = set()
        self.done: dict[nn.Module, tuple[ShardModes, list[str]]] = {}
        self.guards: list[ForwardGuard] = []
        self.order: RunOrder | None = None

    @property
    def meshes(self) -> list[Any]:
        return list(self._meshes.values())

    def shard(self, module: nn.Module, root: nn.Module, usual: ShardModes | None = None) -> None:
        """Make a module a unit: what of it is not in a unit yet is gathered and given back together.

        With `usual` it is one even if nothing is left for it: units that have a root gather ahead of each other.
        """
        # Imported here: those who use no stage 3 need not wait for it.
        from torch.distributed import fsdp
        from torch.distributed.tensor import Shard as DTensorShard

        if isinstance(module, fsdp.FSDPModule) or module in self.done:
            return
        mine = {
            self._names[id(p)]: p
            for p in module.parameters()
            if self._shard_modes.get(id(p)) is not None and id(p) not in self._taken
        }
        # A parameter that a module outside uses too would be given back while that one still needs it.
        if module is not root and _shares(module, root, mine.values()):
            return
        _check_alike(mine, self._shard_modes)
        own = {id(p) for p in mine.values()}
        self._taken |= own
        shard_modes = next((self._shard_modes[id(p)] for p in mine.values()), usual)
        if shard_modes is None:
            return

        # With master weights, shards are fp32 and are gathered in the dtype that the model computes in.
        offload = self._settings.offload and self.context.device.type != "cpu"
        mesh = self._mesh(shard_modes.modes)
        *_, shards = mesh.shape
        gathered_in = self._gather_dtype(mine.values())
        reduced_in = self._settings.reduce_dtype or (None if gathered_in is None else torch.float32)
        for parameter in mine.values():
            parameter.fsdp_dtypes = gathered_in, reduced_in or parameter.dtype  # type: ignore[attr-defined]
        reshard = self._settings.reshard and not getattr(module, "keeps_gathered", False)
        fsdp.fully_shard(
            module,
            mesh=mesh,
            shard_placement_fn=lambda parameter: DTensorShard(shard_dim(parameter.shape, shards)),
            # None: all but the root, whose parameters backward needs at once.
            reshard_after_forward=None if reshard else False,
            # Autocast casts inputs, where it pays.
            mp_policy=fsdp.MixedPrecisionPolicy(gathered_in, reduced_in, cast_forward_inputs=False),
            offload_policy=fsdp.CPUOffloadPolicy() if offload else fsdp.OffloadPolicy(),
            ignored_params={p for p in module.parameters() if id(p) not in own},
        )
        self.done[module] = shard_modes, list(mine)

        # FSDP2 divides by the ranks of its mesh; experts are divided by all ranks that sent them tokens.
        if shard_modes.divisor != mesh.size():
            sharded: Any = module
            sharded.set_gradient_divide_factor(shard_modes.divisor)
            # Only NCCL multiplies while it sums, as FSDP2 has it in fp32 and bf16.
            sharded.set_force_sum_reduction_for_comms(self.context.device.type == "cpu")

    def _gather_dtype(self, mine: Iterable[nn.Parameter]) -> torch.dtype | None:
        """What these are gathered in, if not in what the optimizer steps on; with master weights that is fp32."""
        trained = [parameter for parameter in mine if parameter.requires_grad]
        dtype = next((parameter.dtype for parameter in trained), None)
        if dtype in HALVES and self._settings.master_weights:
            make_fp32(trained)
            return dtype
        return self._settings.gather_dtype if dtype is torch.float32 else None

    def watch(self, old: Mapping[str, nn.Parameter]) -> None:
        """Have the order of the units' collectives compared, and users' gradient hooks run. Collective over the world."""
        # Ranks whose meshes overlap wait for each other, if only through a third: they compare their order together.
        mine = [mesh.mesh.flatten().tolist() for mesh in self.meshes]
        everyone = gather_json(mine, self.context.device)
        ranks = linked(self.context.get_global_rank(), [each for sets in everyone for each in sets])
        self.context.ensure_groups([ranks] if mine else [])
        if not mine:
            return
        self.order = RunOrder(self.context.group_of_ranks(ranks))
        new = dict(self._model.named_parameters())
        module: Any
        for name, module in self._model.named_modules():
            if module in self.done:
                shard_modes, own = self.done[module]
                members = [Member(each, self._model, old[each], new[each]) for each in own]
                unit, mesh = Unit(module, name or type(self._model).__name__, members), self._mesh(shard_modes.modes)
                replicas = mesh.get_group(0) if mesh.ndim > 1 else None
                module.set_custom_all_gather(WatchedGather(self.order, unit.name))
                module.set_custom_reduce_scatter(WatchedReduce(self.order, unit.reduction, replicas))

    def _mesh(self, modes: tuple[ParallelMode, ...]) -> Any:
        if modes not in self._meshes:
            self._meshes[modes] = self.context.device_mesh(*modes)
        return self._meshes[modes]


def _shares(module: nn.Module, root: nn.Module, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether a module of `root` that is not inside `module` has one of these parameters too."""
    wanted, inside = set(map(id, parameters)), set(module.modules())
    outside = (p for other in root.modules() if other not in inside for p in other._parameters.values())
    return any(id(p) in wanted for p in outside)


def _prefetch(units: Sequence[Any], ahead: int) -> None:
    """Let each unit have the next ones gathered while it computes, in both directions."""
    if not ahead:
        return
    for at, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[at + 1 : at + 1 + ahead]))
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, at - ahead) : at])))


def place_as_sharded(model: nn.Module, layout: Layout, rank: int, settings: ZeroSettings) -> dict[str, ShardModes]:
    """Give the parameters of a model the placements that `shard_model` would give them, without sharding them.

    Returns the modes of those that would be sharded, by name.
    """
    chosen = shard_modes_by_parameter(model, layout, rank, settings)
    found = {}
    for name, parameter in model.named_parameters():
        shard_modes = chosen[id(parameter)]
        if shard_modes is None:
            continue
        *over, mode = shard_modes.modes
        dim = shard_dim(parameter.shape, len(layout.group_of(mode, rank)))
        modes: dict[ParallelMode, Spec] = {**_other_modes(parameter, shard_modes), mode: Shard(dim, "nothing")}
        modes |= {replicas: Replicate("nothing") for replicas in over}
        place(parameter, modes, placement_of(parameter).shape)
        found[name] = shard_modes
    return found


def _other_modes(old: nn.Parameter, shard_modes: ShardModes | None) -> dict[ParallelMode, Spec]:
    """The placement on modes that FSDP2 does not know; over data the gradient is final, also for expert-data shards."""
    modes: dict[ParallelMode, Spec] = dict(placement_of(old).modes)
    if shard_modes is not None and shard_modes.cut is not ParallelMode.DATA:
        modes[ParallelMode.DATA] = Replicate(owes="nothing")
    return modes


def _keep_placement(old: nn.Parameter, new: Tensor, shard_modes: ShardModes | None) -> None:
    """Carry the placement on other modes over to the sharded parameter."""
    modes = _other_modes(old, shard_modes)
    if modes:
        place(old, modes, placement_of(old).shape)
        copy_placement(old, new)


def _check_alike(mine: Mapping[str, nn.Parameter], shard_modes: Mapping[int, ShardModes | None]) -> None:
    """Refuse parameters that cannot be gathered together."""
    kinds: dict[ShardModes | None, str] = {}
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in mine.items():
        kinds.setdefault(shard_modes[id(parameter)], name)
        if parameter.requires_grad:
            dtypes.setdefault(parameter.dtype, name)
    if len(kinds) > 1:
        shown = "; ".join(f"{name} over {key.cut.name} / {key.divisor}" for key, name in kinds.items() if key)
        raise PlacementError(
            f"zero stage 3 gathers a module's parameters together, but these are sharded differently: {shown}. Put the "
            f"experts into a module of their own."
        )
    if len(dtypes) > 1:
        shown = "; ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
        raise PlacementError(
            f"zero stage 3 gathers a module's parameters together, which takes one dtype: {shown}. Give them one dtype, or "
            f"name modules of one dtype each in zero.wrap."
        )


# --- Over which ranks a parameter is sharded ---


_DATA_MODES = (ParallelMode.DATA, ParallelMode.EXPERT_DATA, ParallelMode.MOE_DATA)


@dataclass(frozen=True)
class ShardModes:
    """Over which modes a parameter is sharded (the last) and replicated (one before it), and its divisor."""

    modes: tuple[ParallelMode, ...]
    divisor: int

    @property
    def cut(self) -> ParallelMode:
        """The mode over which it is sharded."""
        *_, last = self.modes
        return last


def shard_modes_by_parameter(
    model: nn.Module, layout: Layout, rank: int, settings: ZeroSettings
) -> dict[int, ShardModes | None]:
    """By id of each parameter that is not a DTensor yet: the modes that stage 3 shards it over; None: it is not sharded."""
    axis = replica_mode(layout, settings.replicate)
    left = left_whole(model, list(model) if isinstance(model, nn.ModuleList) else [model])
    return {
        id(p): None if id(p) in left else shard_modes_of(p, layout, rank, axis)
        for p in model.parameters()
        if not is_dtensor(p)
    }


def shard_modes_of(parameter: Tensor, layout: Layout, rank: int, axis: ParallelMode | None) -> ShardModes | None:
    """From what its gradient owes: a mean over data, or over what experts have of it; None if there is nothing."""
    factors = owed(layout, placement_of(parameter), rank)
    over_data = [factor for factor in factors if factor.mode in _DATA_MODES and len(factor.ranks) > 1]
    over_axis = [factor for factor in factors if factor.mode is axis]
    if not over_data:
        return None
    both = [*over_axis, *over_data]
    return ShardModes(tuple(factor.mode for factor in both), prod(factor.divisor for factor in both))


def _usual_modes(shard_modes: Mapping[int, ShardModes | None], root: nn.Module) -> ShardModes | None:
    """How most elements are sharded: so is the root."""
    counts: Counter[ShardModes] = Counter()
    for parameter in root.parameters():
        key = shard_modes.get(id(parameter))
        if key is not None:
            counts[key] += parameter.numel()
    most = [key for key, _ in counts.most_common()]
    return next((key for key in most if key.cut is ParallelMode.DATA), next(iter(most), None))


def _sharded_apart(
    module: nn.Module, shard_modes: Mapping[int, ShardModes | None], usual: ShardModes | None
) -> list[nn.Module]:
    """The largest modules all of whose parameters are sharded alike, and otherwise than usual: the experts."""
    keys = {shard_modes.get(id(p)) for p in module.parameters() if id(p) in shard_modes} - {None}
    if not keys or keys == {usual}:
        return []
    if len(keys) == 1:
        return [module]
    return [found for child in module.children() for found in _sharded_apart(child, shard_modes, usual)]


def left_whole(model: nn.Module, roots: Sequence[nn.Module]) -> set[int]:
    """Parameters that FSDP2 cannot shard; they stay whole on every rank and are summed by our handlers.

    Scalars, empty and complex ones, those that are not contiguous, have sparse gradients, or are shared by two chunks.
    """
    left = {
        id(p) for p in model.parameters() if p.dim() == 0 or not p.numel() or p.is_complex() or not p.is_contiguous()
    }
    left |= {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse}
    met: set[int] = set()
    for root in roots:
        own = {id(p) for p in root.parameters()}
        left |= own & met
        met |= own
    return left


def replica_mode(layout: Layout, name: str | None) -> ParallelMode | None:
    """The mode of the axis that shards are replicas on."""
    if name is None:
        return None
    names = {axis.name: axis.mode for axis in layout.axes if axis.data == "distinct" and axis.name != "data"}
    if name not in names:
        raise ConfigError(
            f"zero.replicate={name!r}: no axis beside data whose ranks see distinct data; there are "
            f"{listed(names) or 'none'}. Add one: parallel = dict({name}=dict(size=2, mode='replica'), ...)."
            f"{did_you_mean(name, names)}",
            code="C003",
        )
    return names[name]


def shards_between_hosts(layout: Layout, name: str | None, ranks_per_host: str | None) -> str | None:
    """What to say where the ranks that share shards lie on several hosts although smaller groups would not; else None."""
    here = int(ranks_per_host) if ranks_per_host and ranks_per_host.isdigit() else 0
    stride, data = layout.grid.digits["data"]
    span = stride * data
    if name is None or layout.places is not None or not 0 < here < layout.world_size or here % span == 0:
        return None
    copies = layout.grid.sizes[name] * data
    best = max(
        (size for size in range(1, here // stride + 1) if here % (size * stride) == copies % size == 0), default=1
    )
    if best == 1:
        return None
    return (
        f"zero.replicate={name!r}: the {data} ranks that share shards, such as {list(layout.group_of(ParallelMode.DATA, 0)[:8])}, "
        f"do not lie on one host of {here} ranks (LOCAL_WORLD_SIZE), so every layer is gathered and scattered between hosts. "
        f"With data={best} and {name} of size {copies // best} they would"
    )


# --- Which modules are gathered one by one ---


_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def chosen_modules(root: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """The modules that are gathered one by one, inner ones first: as named, else the members of outer containers."""
    if not patterns:
        return [module for module in outer_members(root) if any(True for _ in module.parameters())]
    named = [(name, module) for name, module in root.named_modules() if name]
    found = [
        module
        for name, module in named
        if any(fnmatchcase(name, pattern) or type(module).__name__ == pattern for pattern in patterns)
    ]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) or type(module).__name__ == pattern for name, module in named):
            names = [name for name, _ in named]
            raise ConfigError(
                f"zero.wrap: {pattern!r} names no module and no class.{did_you_mean(pattern, names)}", code="C003"
            )
    return list(reversed(found))


def outer_members(module: nn.Module) -> Iterable[nn.Module]:
    """The members of the outermost containers of a model: its blocks, and what is in a row with them."""
    for child in module.children():
        if isinstance(module, _CONTAINERS) and not _is_list(child, module):
            yield child
        else:
            yield from outer_members(child)


def _is_list(child: nn.Module, parent: nn.Module) -> bool:
    """Whether a member of a container is itself one of modules to gather: a list, or the blocks of a sequential model."""
    if isinstance(child, nn.Sequential):
        blocks = list(child)
        alike = len({type(block) for block in blocks}) == 1 and all(any(True for _ in b.children()) for b in blocks)
        return isinstance(parent, nn.Sequential) and alike
    return isinstance(child, (nn.ModuleList, nn.ModuleDict))


# --- The optimizer, and the ranks that wait for each other ---


def _step_kinds_apart(optimizer: Any) -> None:
    """torch steps on many tensors in one call, which cannot hold both shards and whole parameters: such a group goes one by one."""
    for group in optimizer.param_groups:
        if len({is_dtensor(parameter) for parameter in group["params"]}) > 1:
            group.update({kind: False for kind in ("foreach", "fused") if kind in group})


def _cut_state(value: Any, old: nn.Parameter, new: Any, name: str) -> Any:
    """State of a whole parameter as the new parameter lies."""
    if not isinstance(value, Tensor) or name == "step" or value.shape != old.shape or not is_dtensor(new):
        return value
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(new.shape, new.device_mesh, new.placements)
    part = value[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
    return as_dtensor(part.clone(), new)


def linked(rank: int, rank_sets: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """The ranks that wait for each other: those of a set that has `rank` in it, and of all that overlap with those."""
    found, sets = {rank}, [set(ranks) for ranks in rank_sets]
    while more := set().union(*(ranks for ranks in sets if ranks & found)) - found:
        found |= more
    return tuple(sorted(found))
