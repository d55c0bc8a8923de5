"""Placement: how a parameter is sharded or replicated over the modes (the dimensions of the device mesh).

Gradient reductions, the ledger, clipping, checkpoints and verification are all derived from placements. A parameter without a
placement is replicated on every mode. The placement of a DTensor is read from the DTensor (`effective_placement`), so everything
derived from placements supports DTensors too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from colonnade.context.layout import Layout
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError, did_you_mean, listed

Owes = Literal["auto", "sum", "nothing"]
"""The reduction that the local gradient needs over a mode. "auto": a sum if the ranks see distinct data, else nothing."""

_ATTRIBUTE = "_colonnade_placement"


@dataclass(frozen=True)
class Shard:
    """Each rank of the mode has a shard of dimension `dim`. Shards may be uneven or empty.

    Args:
        dim: The sharded dimension.
        owes: The reduction that the gradient of the shard needs over this mode. "nothing": it is already reduced and averaged, as
            in FSDP. "auto": a mean if the ranks see distinct data, else nothing.
        sections: Lengths of several weights that are concatenated along `dim` (gate and up; query, key and value). Each weight is
            sharded evenly, and a rank stores the concatenation of its shards of all of them.
    """

    dim: int
    owes: Literal["auto", "nothing"] = "auto"
    sections: tuple[int, ...] = ()


@dataclass(frozen=True)
class Replicate:
    """Every rank of the mode has the same elements.

    Args:
        owes: The reduction that the local gradient needs over the mode. "sum": the gradient is partial (DTensor: `Partial`).
            "nothing": the gradient is already reduced. "auto": a mean if the ranks see distinct data, else nothing.
    """

    owes: Owes = "auto"


@dataclass(frozen=True)
class Tied:
    """A parameter that several pipeline stages share (tied weights); each stage has a copy.

    Args:
        stages: The pipeline stages that have the parameter.
        key: A name of the parameter that is equal at all these stages.
    """

    stages: tuple[int, ...]
    key: str


Spec = Shard | Replicate | Tied
Rule = str | Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True)
class Placement:
    """The spec of a parameter on each mode; modes that are not listed are `Replicate()`.

    Args:
        modes: The spec on each mode. Several modes may shard one dimension; the first is the outermost.
        shape: The shape of the full tensor, needed only for uneven shards; else it follows from the local shape.
    """

    modes: Mapping[ParallelMode, Spec] = field(default_factory=lambda: MappingProxyType({}))
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "modes", MappingProxyType(dict(self.modes)))

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """A hashable key: equal placements have equal keys. The first part of the key leaves out the shape of the tensor."""
        # In the given order, which matters if two modes shard one dimension.
        return tuple(self.modes.items()), self.shape

    @cached_property
    def _hash(self) -> int:
        return hash(self.key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.key == other.key

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Placement, (dict(self.modes), self.shape)

    def on(self, mode: ParallelMode) -> Spec:
        """The spec of the parameter on `mode`."""
        return self.modes.get(mode, Replicate())

    @cached_property
    def shards(self) -> dict[ParallelMode, Shard]:
        """The modes that shard the parameter, in the given order (outermost first)."""
        return {mode: spec for mode, spec in self.modes.items() if isinstance(spec, Shard)}

    @cached_property
    def tied(self) -> Tied | None:
        """The spec of a parameter that is tied over pipeline stages; else None."""
        spec = self.modes.get(ParallelMode.PIPELINE)
        return spec if isinstance(spec, Tied) else None

    @property
    def tie_key(self) -> str:
        """The key of a tied parameter; empty for other parameters.

        A stable sort by this key therefore keeps the others in model order.
        """
        return self.tied.key if self.tied is not None else ""

    def __str__(self) -> str:
        parts = []
        for mode, spec in self.modes.items():
            parts.append(f"{mode.name}: {_spec_text(spec)}")
        return "{" + ", ".join(parts) + "}" if parts else "replicated"


_REPLICATED = Placement()


def place(
    parameter: Tensor,
    modes: Mapping[ParallelMode, Spec],
    shape: tuple[int, ...] | None = None,
) -> Tensor:
    """Set the placement of a parameter, in place of an earlier one.

    Args:
        parameter: A plain parameter (the local shard), not a DTensor.
        modes: The spec on each mode; modes that are not listed are `Replicate()`.
        shape: The shape of the full tensor, needed only for uneven shards.

    Returns:
        The parameter.

    Raises:
        PlacementError: The specs contradict each other or the shape of the parameter.

    Example::

        gpc = colonnade.launch(dict(parallel=dict(tensor=2)))
        weight = nn.Parameter(torch.randn(8, 4))  # this rank's half of a 16 x 4 weight
        colonnade.place(weight, {colonnade.ParallelMode.TENSOR: colonnade.Shard(0)})
    """
    if is_dtensor(parameter):
        raise PlacementError(
            "this parameter is a DTensor and already has placements. Call place() only on plain parameters.",
            code="C030",
        )
    checked = {ParallelMode(mode): _checked(spec, ParallelMode(mode), parameter) for mode, spec in modes.items()}
    record = Placement(checked, tuple(shape) if shape is not None else None)
    _check_shape(record, parameter)
    _attach(parameter, record)
    return parameter


def place_module(module: nn.Module, rules: Mapping[Rule, Mapping[ParallelMode, Spec]]) -> nn.Module:
    """Set the placements of the parameters of a module by rules.

    Args:
        module: The module.
        rules: A rule is a pattern of the parameter's name ("*.weight"), or a function of name and parameter. The first rule
            that matches a parameter applies.

    Returns:
        The module.

    Raises:
        PlacementError: A rule matches no parameter: with a typo in a pattern, parameters would silently stay replicated.

    Example::

        norm = nn.LayerNorm(8)  # each tensor rank sees some of the tokens
        colonnade.place_module(norm, {"*": {colonnade.ParallelMode.TENSOR: colonnade.Replicate(owes="sum")}})
    """
    named = dict(module.named_parameters())
    for name, parameter in named.items():
        rule = next((rule for rule in rules if _fits(rule, name, parameter)), None)
        if rule is not None:
            place(parameter, rules[rule])
    for rule in rules:
        if not any(_fits(rule, name, parameter) for name, parameter in named.items()):
            raise PlacementError(
                f"the rule {rule!r} matches no parameter. The parameters are "
                f"{listed(list(named)[:20])}{' ...' if len(named) > 20 else ''}.{did_you_mean(str(rule), named)}",
                code="C030",
            )
    return module


def placement_of(parameter: Tensor) -> Placement:
    """The placement of a plain parameter; replicated on every mode if `place` was never called."""
    return getattr(parameter, _ATTRIBUTE, None) or _REPLICATED


def is_placed(parameter: Tensor) -> bool:
    """Whether `place` was called on the parameter."""
    return hasattr(parameter, _ATTRIBUTE)


def copy_placement(source: Tensor, target: Tensor) -> None:
    """Copy the placement to another tensor with the same elements, such as a master weight."""
    if is_placed(source):
        _attach(target, placement_of(source))


def is_dtensor(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor. Does not import torch.distributed.tensor, because that import is slow."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def logical_shape(parameter: Tensor, placement: Placement, sizes: Mapping[ParallelMode, int]) -> tuple[int, ...]:
    """The shape of the full tensor: as declared, or the local shape times the size of each mode that shards it."""
    if placement.shape is not None:
        return placement.shape
    shape = list(parameter.shape)
    for mode, shard in placement.shards.items():
        shape[shard.dim] = sum(shard.sections) if shard.sections else shape[shard.dim] * sizes[mode]
    return tuple(shape)


def _fits(rule: Rule, name: str, parameter: nn.Parameter) -> bool:
    return fnmatchcase(name, rule) if isinstance(rule, str) else rule(name, parameter)


def _attach(parameter: Tensor, record: Placement) -> None:
    setattr(parameter, _ATTRIBUTE, record)
    if isinstance(parameter, nn.Parameter):
        # torch's own Parameter.__deepcopy__ drops attributes. With None here, copy.deepcopy uses __reduce_ex__, which keeps
        # them: a deep copy of a model has the placements of the model.
        parameter.__deepcopy__ = None  # type: ignore[method-assign, assignment]


def _checked(spec: object, mode: ParallelMode, parameter: Tensor) -> Spec:
    if isinstance(spec, Shard):
        dims = parameter.dim()
        if not -dims <= spec.dim < dims:
            has = (
                f"dimensions 0 to {dims - 1}"
                if dims
                else "no dimension to shard. Give it one dimension, as in torch.ones(1)"
            )
            raise PlacementError(
                f"Shard({spec.dim}) on {mode} is not possible, because a parameter of shape {tuple(parameter.shape)} "
                f"has {has}",
                code="C030",
            )
        sections = tuple(int(length) for length in spec.sections)
        here = parameter.shape[spec.dim]
        if sections and (min(sections) < 1 or here == 0 or sum(sections) % here):
            raise PlacementError(
                f"{_spec_text(spec)} on {mode} has a shard of {here} elements along dimension {spec.dim}, which is "
                f"not an even share of sections of {listed(sections)}. Give the full length of each section, "
                "divisible by the number of ranks of the mode.",
                code="C030",
            )
        return Shard(spec.dim % dims, spec.owes, sections if len(sections) > 1 else ())
    if isinstance(spec, Tied):
        if mode is not ParallelMode.PIPELINE:
            raise PlacementError(
                f"Tied is allowed only for {ParallelMode.PIPELINE} (the stages that share a weight), not for {mode}",
                code="C030",
            )
        if len(set(spec.stages)) < 2 or not spec.key:
            raise PlacementError(
                f"{spec} is not valid. Give at least two different stages, and a key that is the same on each of them.",
                code="C030",
            )
        return Tied(tuple(sorted(set(spec.stages))), spec.key)
    if isinstance(spec, Replicate):
        if spec.owes not in ("auto", "sum", "nothing"):
            raise PlacementError(
                f"Replicate got owes={spec.owes!r}; allowed are 'auto', 'sum' and 'nothing'", code="C030"
            )
        return spec
    raise PlacementError(
        f"{spec!r} on {mode} is not a placement. Use Shard(dim), Replicate() or Tied(stages, key).", code="C030"
    )


def _check_shape(record: Placement, parameter: Tensor) -> None:
    for packed in (shard for shard in record.shards.values() if shard.sections):
        if sum(shard.dim == packed.dim for shard in record.shards.values()) > 1:
            raise PlacementError(
                f"{record} has sections in dimension {packed.dim}, so only one mode can shard this dimension",
                code="C030",
            )
        if record.shape is not None and record.shape[packed.dim] != sum(packed.sections):
            raise PlacementError(
                f"{record} has sections of {sum(packed.sections)} elements in total along dimension {packed.dim}, "
                f"but the full tensor of shape {record.shape} has {record.shape[packed.dim]}. Correct the sections "
                "or the full shape.",
                code="C030",
            )
    if record.shape is None:
        return
    sharded = {shard.dim for shard in record.shards.values()}
    fits = len(record.shape) == parameter.dim() and all(
        local <= full if dim in sharded else local == full
        for dim, (local, full) in enumerate(zip(parameter.shape, record.shape, strict=True))
    )
    if not fits:
        raise PlacementError(
            f"a local shape of {tuple(parameter.shape)} cannot be a shard of a full tensor of shape {record.shape} "
            f"that is sharded on dimension {sorted(sharded) or 'none'}. Correct shape= or the placement.",
            code="C030",
        )


def _spec_text(spec: Spec) -> str:
    if isinstance(spec, Shard):
        owes = "" if spec.owes == "auto" else f", owes={spec.owes!r}"
        return f"Shard({spec.dim}{owes}{f', sections={tuple(spec.sections)}' if spec.sections else ''})"
    if isinstance(spec, Tied):
        return f"Tied({', '.join(map(str, spec.stages))} as {spec.key!r})"
    return "Replicate()" if spec.owes == "auto" else f"Replicate(owes={spec.owes!r})"


def effective_placement(parameter: Tensor, layout: Layout, rank: int) -> Placement:
    """The placement of any parameter: for a DTensor read from its mesh, for a plain parameter as set by `place`.

    A mesh dimension becomes the mode whose group on this rank has the same ranks. DTensor and FSDP reduce gradients over their
    own mesh, so no further reduction is required there.
    """
    by_hand = placement_of(parameter)
    if not is_dtensor(parameter):
        return by_hand
    tensor: Any = parameter
    mesh = tensor.device_mesh
    key = (mesh, tensor.placements, rank)
    if key not in layout.derived:
        modes: dict[ParallelMode, Spec] = {}
        grid, here = mesh.mesh, mesh.get_coordinate()
        for dim, spec in enumerate(tensor.placements):
            index = [slice(None) if at == dim else here[at] for at in range(grid.dim())]
            ranks = [int(other) for other in grid[tuple(index)].flatten().tolist()]
            if len(ranks) == 1:
                continue
            candidates = [*(axis.mode for axis in layout.axes), *layout.modes]
            fitting = (
                mode
                for mode in candidates
                if mode not in modes and layout.has(mode, rank) and layout.group_of(mode, rank) == sorted(ranks)
            )
            mode = next(fitting, None)
            if mode is None:
                raise PlacementError(
                    f"a DTensor is on a mesh dimension of ranks {ranks}, but these ranks are not a group of any mode "
                    f"of this world ({listed(mode.name for mode in layout.modes)}). Build the mesh with "
                    "context.device_mesh(modes...), or add a mode with this group under `parallel`.",
                    code="C030",
                )
            modes[mode] = _spec(spec)
        layout.derived[key] = modes
    # The placement from before FSDP is the outer one: FSDP shards each shard of it over the mesh.
    sizes = {mode: len(layout.group_of(mode, rank)) for mode in by_hand.shards}
    return Placement({**by_hand.modes, **layout.derived[key]}, logical_shape(tensor, by_hand, sizes))


def local_part(tensor: Tensor, like: Any = None) -> Tensor:
    """The elements that this rank stores: the local tensor of a DTensor (first redistributed to the placements of `like`), or
    the plain tensor itself."""
    placed: Any = tensor
    if not is_dtensor(placed):
        return tensor
    with torch.no_grad():  # autograd would add a node for each
        if like is not None and placed.placements != like.placements:
            placed = placed.redistribute(placements=like.placements)
        return placed.to_local().detach()


def as_dtensor(local: Tensor, like: Any) -> Tensor:
    """Make a DTensor with the placements of `like` from `local`, this rank's shard."""
    # Imported here, because it takes two seconds, which models without DTensors should not pay.
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def _spec(spec: Any) -> Spec:
    if spec.is_replicate():
        return Replicate(owes="nothing")
    if not spec.is_partial():  # not is_shard(): FSDP2 over a TP plan has strided shards, for which that is False
        return Shard(spec.dim, owes="nothing")
    raise PlacementError(
        f"a DTensor parameter has the placement {spec} with a pending sum, so its norm and its update are not "
        "defined. Redistribute it to Shard or Replicate first.",
        code="C030",
    )


# --------------------------------------------------------------------------------------------------
# The full parameter that a shard was taken from: detects a weight shared by two layers that became two shards.
# --------------------------------------------------------------------------------------------------


_SOURCE_ATTRIBUTE = "_colonnade_source"


def note_source(part: Tensor, whole: Tensor) -> None:
    """Record that `part` was copied out of `whole`.

    The record keeps neither tensor alive, and copies of the tensors do not have it.
    """
    source = getattr(whole, _SOURCE_ATTRIBUTE, None) or object()
    setattr(whole, _SOURCE_ATTRIBUTE, source)
    setattr(part, _SOURCE_ATTRIBUTE, source)


def check_ties(modules: Iterable[nn.Module]) -> None:
    """Raise PlacementError if two trained parameters were copied out of the same parameter: tied weights that would be trained
    separately.

    Also raises for two parameters of a module that share memory, because each would get its own memory.
    """
    seen: dict[object, tuple[str, nn.Parameter]] = {}
    for module in modules:
        in_memory: dict[int, str] = {}
        for name, parameter in module.named_parameters():
            address = local_part(parameter).data_ptr() if parameter.requires_grad and not parameter.is_meta else 0
            if address and in_memory.setdefault(address, name) != name:
                raise PlacementError(
                    f"{in_memory[address]!r} and {name!r} share memory, but are two parameters with separate "
                    "gradients and optimizer state. To tie them, use one parameter: head.weight = embedding.weight "
                    "(not .data). To keep two, give one a copy: parameter.data = parameter.data.clone()"
                )
            source = getattr(parameter, _SOURCE_ATTRIBUTE, parameter)
            first, other = seen.setdefault(source, (name, parameter))
            if other is not parameter and other.requires_grad and parameter.requires_grad:
                raise PlacementError(
                    f"{first!r} and {name!r} come from one full parameter. They were tied before from_module(), but "
                    "would now be trained separately. To tie them, give the second layer the weight of the first, as "
                    "in Classifier.from_module(head, weight=embedding.weight). To keep two, convert "
                    "copy.deepcopy(module) for one of them."
                )
