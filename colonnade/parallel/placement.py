"""Placement: the one record of how a parameter lies on the modes. Every later stage reads it and nothing else.

Gradient sync, the ledger, clipping, checkpoints and verification are all derived from it. A parameter
without one is replicated on every mode; a DTensor's is read from the DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor, nn

from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError, did_you_mean, listed

Owes = Literal["auto", "sum", "nothing"]
"""The sum that the raw gradient still owes over a mode. "auto" is: a sum where ranks see distinct data, else nothing."""

_ATTRIBUTE = "_colonnade_placement"


@dataclass(frozen=True)
class Shard:
    """Each rank of the mode holds its own part of dimension `dim`. Parts may be uneven or empty.

    `owes="nothing"` says that the gradient is already final over this mode, its mean included (FSDP). `sections` are the
    lengths of several weights that lie one after another along `dim` (gate and up; query, key and value): each is cut
    evenly, and a rank holds its parts of them, joined.
    """

    dim: int
    owes: Literal["auto", "nothing"] = "auto"
    sections: tuple[int, ...] = ()


@dataclass(frozen=True)
class Replicate:
    """Every rank of the mode holds the same elements; `owes` says what its raw gradient still needs."""

    owes: Owes = "auto"


@dataclass(frozen=True)
class Tied:
    """A logical parameter that lives at several pipeline stages, under the name `key` on all of them."""

    stages: tuple[int, ...]
    key: str


Spec = Shard | Replicate | Tied
Rule = str | Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True)
class Placement:
    """How a parameter lies on each mode; modes that are not listed are `Replicate()`.

    `shape` is the whole tensor's, needed only where shards are uneven; else it follows from the local one.
    """

    modes: Mapping[ParallelMode, Spec] = field(default_factory=lambda: MappingProxyType({}))
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "modes", MappingProxyType(dict(self.modes)))

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal placements. Its first part says all but the shape of the tensor."""
        # In order: two shards of one dimension lie inside one another in the order they were given.
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
        """How the parameter lies on `mode`."""
        return self.modes.get(mode, Replicate())

    @cached_property
    def shards(self) -> dict[ParallelMode, Shard]:
        """The modes that it is split over, in the order they were given (outermost first)."""
        return {mode: spec for mode, spec in self.modes.items() if isinstance(spec, Shard)}

    @cached_property
    def tied(self) -> Tied | None:
        """Where else in the pipeline it lives."""
        spec = self.modes.get(ParallelMode.PIPELINE)
        return spec if isinstance(spec, Tied) else None

    @property
    def tie_key(self) -> str:
        """The name of a tied parameter on all its stages; empty for others, so that sorting by it leaves those in the model's order."""
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
    """Give a parameter its placement and return the parameter. Replaces an earlier one."""
    if is_dtensor(parameter):
        raise PlacementError(
            "this parameter is a DTensor, which carries its own placements; they are read from it. "
            "Place plain parameters only.",
            code="C030",
        )
    checked = {ParallelMode(mode): _checked(spec, ParallelMode(mode), parameter) for mode, spec in modes.items()}
    record = Placement(checked, tuple(shape) if shape is not None else None)
    _check_shape(record, parameter)
    _attach(parameter, record)
    return parameter


def place_module(module: nn.Module, rules: Mapping[Rule, Mapping[ParallelMode, Spec]]) -> nn.Module:
    """Place every parameter that a rule names; the first rule that fits a parameter is its rule.

    A rule is a pattern of the parameter's name ("*.weight") or a function of name and parameter. A rule that
    fits nothing is an error: a slip in a pattern would leave parameters replicated without a word.
    """
    named = dict(module.named_parameters())
    for name, parameter in named.items():
        rule = next((rule for rule in rules if _fits(rule, name, parameter)), None)
        if rule is not None:
            place(parameter, rules[rule])
    for rule in rules:
        if not any(_fits(rule, name, parameter) for name, parameter in named.items()):
            raise PlacementError(
                f"the rule {rule!r} fits no parameter; the names are {listed(list(named)[:20])}"
                f"{' ...' if len(named) > 20 else ''}.{did_you_mean(str(rule), named)}",
                code="C030",
            )
    return module


def placement_of(parameter: Tensor) -> Placement:
    """The placement of a plain parameter; one that was never placed is replicated on every mode."""
    return getattr(parameter, _ATTRIBUTE, None) or _REPLICATED


def is_placed(parameter: Tensor) -> bool:
    """Whether `place` was called on it."""
    return hasattr(parameter, _ATTRIBUTE)


def copy_placement(source: Tensor, target: Tensor) -> None:
    """Carry the placement over to another tensor of the same meaning, such as a master weight."""
    if is_placed(source):
        _attach(target, placement_of(source))


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor, without importing that module for those who never use it."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def logical_shape(parameter: Tensor, placement: Placement, sizes: Mapping[ParallelMode, int]) -> tuple[int, ...]:
    """The shape of the whole tensor: as declared, else the local shape times the size of each sharded mode."""
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
        # torch's own Parameter.__deepcopy__ drops attributes; with None here, copy.deepcopy takes the
        # __reduce_ex__ way, which keeps them. So a deep copy of a model has the placements of the model.
        parameter.__deepcopy__ = None  # type: ignore[method-assign, assignment]


def _checked(spec: object, mode: ParallelMode, parameter: Tensor) -> Spec:
    if isinstance(spec, Shard):
        dims = parameter.dim()
        if not -dims <= spec.dim < dims:
            has = f"dimensions 0 to {dims - 1}" if dims else "no dimension to cut: give it one, as torch.ones(1) has"
            raise PlacementError(
                f"Shard({spec.dim}) on {mode}: a parameter of shape {tuple(parameter.shape)} has {has}", code="C030"
            )
        return Shard(spec.dim % dims, spec.owes, _sections(spec, mode, parameter))
    if isinstance(spec, Tied):
        if mode is not ParallelMode.PIPELINE:
            raise PlacementError(
                f"Tied is for {ParallelMode.PIPELINE} (the stages that share a weight), not {mode}", code="C030"
            )
        if len(set(spec.stages)) < 2 or not spec.key:
            raise PlacementError(
                f"{spec}: give at least two different stages and a key, the same on each of them", code="C030"
            )
        return Tied(tuple(sorted(set(spec.stages))), spec.key)
    if isinstance(spec, Replicate):
        if spec.owes not in ("auto", "sum", "nothing"):
            raise PlacementError(f"Replicate(owes={spec.owes!r}): allowed are 'auto', 'sum' and 'nothing'", code="C030")
        return spec
    raise PlacementError(
        f"{spec!r} on {mode} is no placement; use Shard(dim), Replicate() or Tied(stages, key)", code="C030"
    )


def _sections(spec: Shard, mode: ParallelMode, parameter: Tensor) -> tuple[int, ...]:
    sections = tuple(int(length) for length in spec.sections)
    here = parameter.shape[spec.dim]
    if sections and (min(sections) < 1 or here == 0 or sum(sections) % here):
        raise PlacementError(
            f"{_spec_text(spec)} on {mode}: a part of {here} elements along dimension {spec.dim} is no even share of sections "
            f"of {listed(sections)}; give the whole length of each section, which the ranks of the mode divide",
            code="C030",
        )
    return sections if len(sections) > 1 else ()


def _check_shape(record: Placement, parameter: Tensor) -> None:
    for packed in (shard for shard in record.shards.values() if shard.sections):
        if sum(shard.dim == packed.dim for shard in record.shards.values()) > 1:
            raise PlacementError(
                f"{record}: dimension {packed.dim} has sections, so only one mode can cut it", code="C030"
            )
        if record.shape is not None and record.shape[packed.dim] != sum(packed.sections):
            raise PlacementError(
                f"{record}: the sections are {sum(packed.sections)} elements along dimension {packed.dim}, and the whole of "
                f"shape {record.shape} has {record.shape[packed.dim]}",
                code="C030",
            )
    if record.shape is None:
        return
    split = {shard.dim for shard in record.shards.values()}
    fits = len(record.shape) == parameter.dim() and all(
        here <= whole if dim in split else here == whole
        for dim, (here, whole) in enumerate(zip(parameter.shape, record.shape, strict=True))
    )
    if not fits:
        raise PlacementError(
            f"a local part of shape {tuple(parameter.shape)} cannot come from a whole of shape {record.shape} "
            f"split on dimension {sorted(split) or 'none'}",
            code="C030",
        )


def _spec_text(spec: Spec) -> str:
    if isinstance(spec, Shard):
        owes = "" if spec.owes == "auto" else f", owes={spec.owes!r}"
        return f"Shard({spec.dim}{owes}{f', sections={tuple(spec.sections)}' if spec.sections else ''})"
    if isinstance(spec, Tied):
        return f"Tied({', '.join(map(str, spec.stages))} as {spec.key!r})"
    return "Replicate()" if spec.owes == "auto" else f"Replicate(owes={spec.owes!r})"
