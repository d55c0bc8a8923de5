"""ZeRO stage 3: parameters are sharded by torch's FSDP2, each over the ranks that store the same elements and see distinct data.

`shard_model` decides three things and leaves the rest to `fully_shard`:

- the ranks over which each parameter is sharded (`shard_modes_of`): the data group for most, the expert-data group for experts,
  whose gradients are divided by all ranks that sent tokens. Parameters that FSDP2 cannot shard stay unsharded
  (`unsharded_parameters`);
- the FSDP units, modules whose parameters are gathered and freed together (`chosen_modules`): the blocks of a model, and experts
  separately;
- the dtypes of all-gather and gradient reduction.

FSDP2 reduces the gradients of sharded parameters; gradient handlers reduce those of unsharded ones. Placements on other modes
(tensor, pipeline, expert) are copied to the shards, so that norm, ledger and checkpoint read them as usual.
`colonnade.optim.zero.fsdp_checks` checks that all ranks run the same units in the same order.
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
from colonnade.parallel.placement import (
    Replicate,
    Shard,
    Spec,
    as_dtensor,
    copy_placement,
    is_dtensor,
    place,
    placement_of,
)


def shard_model(model: nn.Module, context: ParallelContext, settings: ZeroSettings) -> ShardedModel:
    """Apply FSDP2 to all parameters that are not DTensors already. Collective over the world."""
    old = {name: p for name, p in model.named_parameters() if not is_dtensor(p)}
    roots = list(model) if isinstance(model, nn.ModuleList) else [model]
    with agreed_errors(context.device):
        shard_modes = shard_modes_by_parameter(model, context.layout, context.get_global_rank(), settings)
        between = shards_between_hosts(context.layout, settings.replicate, os.environ.get("LOCAL_WORLD_SIZE"))
        if between and not context.is_simulated:
            get_dist_logger().warning(between, ranks=[0])

        # `fully_shard` takes the parameters that are in no unit yet, so inner modules come first: experts, which are sharded over
        # other ranks, then the blocks. The root takes the rest, and is a unit even if nothing is left, since only units below a
        # common root prefetch each other.
        units = _Units(model, shard_modes, context, settings)
        for root in roots:
            chosen, usual = chosen_modules(root, settings.wrap), _usual_modes(shard_modes, root)
            for module in [*_sharded_apart(root, shard_modes, usual), *chosen]:
                units.shard(module, root)
            units.shard(root, root, usual)

            # FSDP2 prefetches the next unit by itself; `settings.prefetch` sets how many, in both directions.
            of_root: list[Any] = [module for module in root.modules() if module in units.done]
            ahead = settings.prefetch
            for at, unit in enumerate(of_root if ahead else []):
                unit.set_modules_to_forward_prefetch(of_root[at + 1 : at + 1 + ahead])
                unit.set_modules_to_backward_prefetch(list(reversed(of_root[max(0, at - ahead) : at])))
            if root in units.done:
                units.guards.append(ForwardGuard(root, of_root))

    # FSDP2 has created new parameters, without the placements of the old ones.
    sharding = ShardedModel(old, model, units)
    for name, parameter in model.named_parameters():
        if name in old and is_dtensor(parameter):
            _copy_modes(old[name], parameter, shard_modes[id(old[name])])
    if not context.is_simulated:
        units.watch(old)
    return sharding


class ShardedModel:
    """The result of `shard_model`: the sharded parameter for each original one, for the optimizer, and the checks of stage 3.

    `units` is the number of FSDP units; `whole` has the names of unsharded parameters.
    """

    def __init__(self, old: Mapping[str, nn.Parameter], model: nn.Module, units: _Units) -> None:
        self._model, self._units = model, units
        self.units = len(units.done)
        new = dict(model.named_parameters())
        self._new = {id(parameter): new[name] for name, parameter in old.items()}
        self._kept = list(old.values())  # keeps the ids in `_new` from being reused
        self.whole = [name for name in old if not is_dtensor(new[name])]

    def carry_over(self, optimizer: Any) -> None:
        """Replace the original parameters in an optimizer by the sharded ones, and shard existing state in the same way."""
        for group in optimizer.param_groups:
            group["params"] = [self._new.get(id(parameter), parameter) for parameter in group["params"]]
        for parameter in [p for p in optimizer.state if id(p) in self._new]:
            new: Any = self._new[id(parameter)]
            state = dict(optimizer.state.pop(parameter))
            for name, value in state.items():
                # Step counts, and other values without an entry per element, are the same for the shard.
                if isinstance(value, Tensor) and name != "step" and value.shape == parameter.shape and is_dtensor(new):
                    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

                    shape, offset = compute_local_shape_and_global_offset(new.shape, new.device_mesh, new.placements)
                    shard = value[tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))]
                    state[name] = as_dtensor(shard.clone(), new)
            optimizer.state[new] = state

    def guard(self, optimizer: Any) -> None:
        """Check that the optimizer can step on shards, and compare the order of collectives before each of its steps."""
        with agreed_errors(self._units.context.device):
            for mesh in self._units.meshes:
                check_optimizer(optimizer, mesh)
        # A multi-tensor step cannot mix DTensors and plain tensors: groups with both step on one tensor at a time.
        for group in optimizer.param_groups:
            if len({is_dtensor(parameter) for parameter in group["params"]}) > 1:
                group.update({kind: False for kind in ("foreach", "fused") if kind in group})
        order, guards = self._units.order, self._units.guards
        self._new, self._kept = {}, []  # frees the unsharded parameters

        # Before weights change, all ranks must have issued the same collectives, and nothing gathered from old weights may stay.
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
    """Calls `fully_shard`, with each parameter once.

    A module that shares a parameter with one outside is no unit; the parameter belongs to the innermost unit around all modules
    that share it.
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
        """Make a module a unit, with all of its parameters that are in no unit yet.

        `usual`: the modes of a unit without parameters. Without it, a module without parameters is no unit.
        """
        # Imported here, as it takes time that only stage 3 needs.
        from torch.distributed import fsdp
        from torch.distributed.tensor import Shard as DTensorShard

        if isinstance(module, fsdp.FSDPModule) or module in self.done:
            return
        parameters = {
            self._names[id(p)]: p
            for p in module.parameters()
            if self._shard_modes.get(id(p)) is not None and id(p) not in self._taken
        }
        # A parameter that is also used outside of the unit would be freed while it is still needed there.
        if module is not root and _shares(module, root, parameters.values()):
            return

        # A unit gathers its parameters in one collective, so they need the same ranks, divisor and dtype.
        kinds: dict[ShardModes | None, str] = {}
        dtypes: dict[torch.dtype, str] = {}
        for name, parameter in parameters.items():
            kinds.setdefault(self._shard_modes[id(parameter)], name)
            if parameter.requires_grad:
                dtypes.setdefault(parameter.dtype, name)
        if len(kinds) > 1:
            shown = "; ".join(
                f"{name} over {key.sharded_over.name} / {key.divisor}" for key, name in kinds.items() if key
            )
            raise PlacementError(
                "ZeRO stage 3 gathers the parameters of a module together, but these parameters are sharded "
                f"differently: {shown}. Put the experts into a separate module."
            )
        if len(dtypes) > 1:
            shown = "; ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
            raise PlacementError(
                "ZeRO stage 3 gathers the parameters of a module together and requires one dtype, but their dtypes "
                f"differ: {shown}. Convert the parameters to one dtype, or name modules with a single dtype in "
                "zero.wrap."
            )
        own = {id(p) for p in parameters.values()}
        self._taken |= own
        shard_modes = next((self._shard_modes[id(p)] for p in parameters.values()), usual)
        if shard_modes is None:
            return

        # With master weights, half-precision parameters become fp32 shards that are gathered in the dtype of the model's
        # computation. fp32 parameters may be gathered in a smaller dtype; otherwise nothing is converted.
        offload = self._settings.offload and self.context.device.type != "cpu"
        mesh = self._mesh(shard_modes.modes)
        *_, shards = mesh.shape
        trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        dtype = next((parameter.dtype for parameter in trained), None)
        gathered_in: torch.dtype | None = None
        if dtype in HALVES and self._settings.master_weights:
            make_fp32(trained)
            gathered_in = dtype
        elif dtype is torch.float32:
            gathered_in = self._settings.gather_dtype
        reduced_in = self._settings.reduce_dtype or (None if gathered_in is None else torch.float32)
        for parameter in parameters.values():
            parameter.fsdp_dtypes = gathered_in, reduced_in or parameter.dtype  # type: ignore[attr-defined]
        reshard = self._settings.reshard and not getattr(module, "keeps_gathered", False)
        fsdp.fully_shard(
            module,
            mesh=mesh,
            shard_placement_fn=lambda parameter: DTensorShard(shard_dim(parameter.shape, shards)),
            # None: all units but the root, whose parameters the backward pass needs first.
            reshard_after_forward=None if reshard else False,
            # Autocast converts the inputs.
            mp_policy=fsdp.MixedPrecisionPolicy(gathered_in, reduced_in, cast_forward_inputs=False),
            offload_policy=fsdp.CPUOffloadPolicy() if offload else fsdp.OffloadPolicy(),
            ignored_params={p for p in module.parameters() if id(p) not in own},
        )
        self.done[module] = shard_modes, list(parameters)

        # FSDP2 divides gradients by the size of its mesh, but those of experts are means over all ranks that sent tokens.
        if shard_modes.divisor != mesh.size():
            sharded: Any = module
            sharded.set_gradient_divide_factor(shard_modes.divisor)
            # FSDP2 would use a reduce operation with a factor, which only NCCL has.
            sharded.set_force_sum_reduction_for_comms(self.context.device.type == "cpu")

    def watch(self, old: Mapping[str, nn.Parameter]) -> None:
        """Compare the order of the collectives of FSDP units between ranks, and run users' gradient hooks.

        Collective over the world.
        """
        # Ranks whose meshes overlap wait for each other, even if only through a third rank: they compare their order together.
        own_groups = [mesh.mesh.flatten().tolist() for mesh in self.meshes]
        groups_of_ranks = gather_json(own_groups, self.context.device)
        ranks = linked(self.context.get_global_rank(), [group for groups in groups_of_ranks for group in groups])
        self.context.ensure_groups([ranks] if own_groups else [])
        if not own_groups:
            return
        self.order = RunOrder(self.context.group_of_ranks(ranks))
        new = dict(self._model.named_parameters())
        module: Any
        for name, module in self._model.named_modules():
            if module in self.done:
                shard_modes, own = self.done[module]
                members = [Member(own_name, self._model, old[own_name], new[own_name]) for own_name in own]
                unit, mesh = Unit(module, name or type(self._model).__name__, members), self._mesh(shard_modes.modes)
                replicas = mesh.get_group(0) if mesh.ndim > 1 else None
                module.set_custom_all_gather(WatchedGather(self.order, unit.name))
                module.set_custom_reduce_scatter(WatchedReduce(self.order, unit.reduction, replicas))

    def _mesh(self, modes: tuple[ParallelMode, ...]) -> Any:
        if modes not in self._meshes:
            self._meshes[modes] = self.context.device_mesh(*modes)
        return self._meshes[modes]


def _shares(module: nn.Module, root: nn.Module, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether a module of `root` outside of `module` uses one of these parameters, too."""
    wanted, inside = set(map(id, parameters)), set(module.modules())
    outside = (p for other in root.modules() if other not in inside for p in other._parameters.values())
    return any(id(p) in wanted for p in outside)


def place_as_sharded(model: nn.Module, layout: Layout, rank: int, settings: ZeroSettings) -> dict[str, ShardModes]:
    """Set the placements that the parameters would have after `shard_model`, without sharding them.

    Returns the modes of each parameter that would be sharded, by name.
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
    """The placement on modes that FSDP2 does not handle. Over data the gradient is final; this includes expert-data shards."""
    modes: dict[ParallelMode, Spec] = dict(placement_of(old).modes)
    # FSDP2 returns reduced gradients. A shard over DATA shows that itself; where another group stands for DATA, the placement
    # must say that the gradient needs no reduction over DATA.
    if shard_modes is not None and shard_modes.sharded_over is not ParallelMode.DATA:
        modes[ParallelMode.DATA] = Replicate(owes="nothing")
    return modes


def _copy_modes(old: nn.Parameter, new: Tensor, over: ShardModes | None) -> None:
    """Copy the placement on other modes to a new parameter that is sharded `over` these modes."""
    modes = _other_modes(old, over)
    if modes:
        place(old, modes, placement_of(old).shape)
        copy_placement(old, new)


# --- The ranks over which a parameter is sharded ---


_DATA_MODES = (ParallelMode.DATA, ParallelMode.EXPERT_DATA, ParallelMode.MOE_DATA)


@dataclass(frozen=True)
class ShardModes:
    """The modes over which FSDP2 shards a parameter (the last mode) and replicates its shards (a mode before it), and the
    gradient's divisor."""

    modes: tuple[ParallelMode, ...]
    divisor: int

    @property
    def sharded_over(self) -> ParallelMode:
        """The mode over which the parameter is sharded."""
        *_, last = self.modes
        return last


def shard_modes_by_parameter(
    model: nn.Module, layout: Layout, rank: int, settings: ZeroSettings
) -> dict[int, ShardModes | None]:
    """The modes over which stage 3 shards each parameter, keyed by id; None for a parameter that is not sharded.

    DTensors are left out.
    """
    axis = replica_mode(layout, settings.replicate)
    left = unsharded_parameters(model, list(model) if isinstance(model, nn.ModuleList) else [model])
    return {
        id(p): None if id(p) in left else shard_modes_of(p, layout, rank, axis)
        for p in model.parameters()
        if not is_dtensor(p)
    }


def shard_modes_of(parameter: Tensor, layout: Layout, rank: int, axis: ParallelMode | None) -> ShardModes | None:
    """The modes over which to shard a parameter: the modes over which its gradient is a mean of distinct data.

    None if the gradient is no mean over several ranks. `axis`: a mode over which shards are replicated, or None.
    """
    factors = owed(layout, placement_of(parameter), rank)
    over_data = [factor for factor in factors if factor.mode in _DATA_MODES and len(factor.ranks) > 1]
    over_axis = [factor for factor in factors if factor.mode is axis]
    if not over_data:
        return None
    both = [*over_axis, *over_data]
    return ShardModes(tuple(factor.mode for factor in both), prod(factor.divisor for factor in both))


def _usual_modes(shard_modes: Mapping[int, ShardModes | None], root: nn.Module) -> ShardModes | None:
    """The modes over which most elements are sharded, which become the modes of the root; DATA is preferred."""
    counts: Counter[ShardModes] = Counter()
    for parameter in root.parameters():
        key = shard_modes.get(id(parameter))
        if key is not None:
            counts[key] += parameter.numel()
    most = [key for key, _ in counts.most_common()]
    return next((key for key in most if key.sharded_over is ParallelMode.DATA), next(iter(most), None))


def _sharded_apart(
    module: nn.Module, shard_modes: Mapping[int, ShardModes | None], usual: ShardModes | None
) -> list[nn.Module]:
    """The largest modules whose parameters are all sharded over the same modes, if these are not the usual modes: the
    experts.
    """
    keys = {shard_modes.get(id(p)) for p in module.parameters() if id(p) in shard_modes} - {None}
    if not keys or keys == {usual}:
        return []
    if len(keys) == 1:
        return [module]
    return [found for child in module.children() for found in _sharded_apart(child, shard_modes, usual)]


def unsharded_parameters(model: nn.Module, roots: Sequence[nn.Module]) -> set[int]:
    """The ids of parameters that FSDP2 cannot shard; they stay unsharded, and gradient handlers reduce their gradients.

    These are scalars, empty, complex and non-contiguous parameters, parameters with sparse gradients, and parameters that two model
    chunks share.
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
    """The mode of the axis `name` (`zero.replicate`), over which shards are replicated; None if `name` is None."""
    if name is None:
        return None
    names = {axis.name: axis.mode for axis in layout.axes if axis.data == "distinct" and axis.name != "data"}
    if name not in names:
        raise ConfigError(
            f"zero.replicate is {name!r}; it must be an axis other than data, and its ranks must see distinct data. "
            f"The layout has {listed(names) or 'none'}. To add such an axis, write parallel = "
            f"dict({name}=dict(size=2, mode='replica'), ...).{did_you_mean(name, names)}",
            code="C003",
        )
    return names[name]


def shards_between_hosts(layout: Layout, name: str | None, ranks_per_host: str | None) -> str | None:
    """A warning if a parameter is sharded over ranks of several hosts although smaller groups would fit on one host; else None."""
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
        f"zero.replicate={name!r} leads to all-gathers and reduce-scatters that cross hosts. The {data} ranks "
        f"that share shards, such as {list(layout.group_of(ParallelMode.DATA, 0)[:8])}, are not on one host of "
        f"{here} ranks (LOCAL_WORLD_SIZE). Use data={best} and {name} of size {copies // best} to place them on "
        "one host"
    )


# --- FSDP units: modules that are gathered one by one ---


_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def chosen_modules(root: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """The modules that become FSDP units, inner modules first.

    With patterns, these are the modules whose name or class matches one; without patterns, the members of the outermost containers.
    """
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
                f"the pattern {pattern!r} in zero.wrap matches no module name and no "
                f"class.{did_you_mean(pattern, names)}",
                code="C003",
            )
    return list(reversed(found))


def outer_members(module: nn.Module) -> Iterable[nn.Module]:
    """The members of the outermost containers of a model, such as its blocks."""
    for child in module.children():
        if isinstance(module, _CONTAINERS) and not _is_list(child, module):
            yield child
        else:
            yield from outer_members(child)


def _is_list(child: nn.Module, parent: nn.Module) -> bool:
    """Whether a member of a container is itself a list of units, because it is a container or has the blocks of a sequential
    model.
    """
    if isinstance(child, nn.Sequential):
        blocks = list(child)
        alike = len({type(block) for block in blocks}) == 1 and all(any(True for _ in b.children()) for b in blocks)
        return isinstance(parent, nn.Sequential) and alike
    return isinstance(child, (nn.ModuleList, nn.ModuleDict))


def linked(rank: int, rank_sets: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """The ranks that may wait for each other: the union of all sets that contain `rank` or overlap with such a set, directly
    or indirectly."""
    found, sets = {rank}, [set(ranks) for ranks in rank_sets]
    while more := set().union(*(ranks for ranks in sets if ranks & found)) - found:
        found |= more
    return tuple(sorted(found))
