"""What a plan is, and which modules and parameters its patterns name.

`resolve` makes a `PlanEntry` for each name out of a plan; `plan_checks.py` checks these entries, and `parallelize.py` gives a
`Target` for each of them to its style (`styles.py`). Values of a plan may be styles of torch's `parallelize_module`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import PlacementError, did_you_mean, listed
from colonnade.nn.layer.arrangement import Arrangement, arrange
from colonnade.texts import pattern_of

Plan = Mapping[str, Any]
"""Pattern -> style. `*` stands for one part of a name between dots: "blocks.*.fc1".

A style is a name, or one of torch's (`ColwiseParallel()`), or a mapping with the name under "style" and options of the
style beside it; "divide" lists attributes of the module (number of heads, width) that are divided by the tensor size.
It may stand without a style.
"""


@dataclass(frozen=True, eq=False)
class Target:
    """A module, or one of its parameters, that a plan gives a style."""

    name: str
    """The full dotted name of the module or of the parameter."""
    module: nn.Module
    """The module, or the owner of the parameter."""
    parameter: str | None
    """The parameter's name in its owner; None where the pattern names a module."""
    model: nn.Module
    """The whole model, or the stage of it that the module is in."""
    context: ParallelContext
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the plan says beside the style: `sections`, say."""
    parts: MutableMapping[nn.Parameter, nn.Parameter] = field(default_factory=WeakIdKeyDictionary)
    """What became of whole parameters: two layers that share one share its part too."""

    @property
    def arrangement(self) -> Arrangement:
        """How activations lie, and how a linear layer multiplies them."""
        return arrange(self.context, self.options.get("sequence"))

    @property
    def parent(self) -> nn.Module | None:
        """The module that the module is a child of."""
        owner = self.name if self.parameter is None else self.name.rpartition(".")[0]
        return self.model.get_submodule(owner.rpartition(".")[0]) if owner else None


@dataclass(frozen=True)
class PlanEntry:
    """What a plan says of one name."""

    pattern: str
    style: Any
    options: Mapping[str, Any]


def resolve(plan: Plan, model: nn.Module) -> dict[str, PlanEntry]:
    """Each module and parameter that the plan names, with what it says of it. Parameters come before modules."""
    if not isinstance(plan, Mapping):
        raise PlacementError(f"a plan is a mapping of patterns to styles, not {plan!r}", code="C060")
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, PlanEntry] = {}
    for pattern, value in plan.items():
        names = [name for name in (*parameters, *modules) if fits(pattern, name)]
        if not names:
            raise PlacementError(_matches_nothing(pattern, (*modules, *parameters)), code="C060")
        for name in names:
            entry = _entry(pattern, value, name, modules.get(name))
            other = found.setdefault(name, entry)
            if (other.style, dict(other.options)) != (entry.style, dict(entry.options)):
                raise PlacementError(
                    f"the plan gives {name!r} two styles: {other.pattern!r} says {plan[other.pattern]!r}, and {pattern!r} "
                    f"says {value!r}; let one pattern name it",
                    code="C060",
                )
    return {name: found[name] for name in (*parameters, *modules) if name in found}


def place_of(name: str, model: nn.Module) -> tuple[nn.Module, str | None]:
    """The module of this name, and None; or the owner of a parameter, and the parameter's name in it."""
    owner, _, last = name.rpartition(".")
    holder = model.get_submodule(owner)
    return (holder, last) if last in holder._parameters else (model.get_submodule(name), None)


def fits(pattern: str, name: str) -> bool:
    """Whether a name fits a pattern, part by part."""
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted))


def _entry(pattern: str, value: Any, name: str, module: nn.Module | None) -> PlanEntry:
    if isinstance(value, Mapping):
        options = dict(value)
        return PlanEntry(pattern, options.pop("style", None), options)
    if is_torch_style(value) and module is not None:
        return PlanEntry(pattern, *from_torch(value, module, name))
    return PlanEntry(pattern, value, {})


def _matches_nothing(pattern: str, names: Iterable[str]) -> str:
    known = list(dict.fromkeys(map(pattern_of, names)))
    shown = [name for name in known if name.rpartition(".")[2] == pattern.rpartition(".")[2]] or known
    return (
        f"the plan's pattern {pattern!r} matches no module and no parameter; a '*' stands for one part of a name between "
        f"dots. Names are {listed(shown[:8])}{' ...' if len(shown) > 8 else ''}.{did_you_mean(pattern, known)}"
    )


# --- Styles of torch's `parallelize_module`, read into ours without importing DTensor ---

_MODULE = "torch.distributed.tensor."
_WHOLE, _FEATURES, _SEQUENCE = "Replicate()", "Shard(-1)", "Shard(1)"
_LAYOUTS = f"activations are [batch, sequence, features], so layouts are {_WHOLE}, {_FEATURES} and {_SEQUENCE}"


def is_torch_style(value: Any) -> bool:
    """Whether it is a style of torch's."""
    return type(value).__module__.startswith(_MODULE)


def from_torch(value: Any, module: nn.Module, name: str) -> tuple[str, dict[str, Any]]:
    """Our style, and its options, for a module that a plan gives this style of torch's."""
    kind = type(value).__name__
    embeds = isinstance(module, nn.Embedding)
    if kind == "ColwiseParallel":
        source, target = _layout(value.input_layouts), _layout(value.output_layouts)
        known = {_FEATURES: "colwise", _WHOLE: "embedding_colwise" if embeds else "colwise_gather_output"}
        if source in (_WHOLE, _SEQUENCE) and target in known and not (embeds and source == _SEQUENCE):
            return known[target], {"sequence": source == _SEQUENCE}
        raise _refused(name, kind, f"from {source} to {target}")
    if kind == "RowwiseParallel":
        source, target = _layout(value.input_layouts), _layout(value.output_layouts)
        known = {_WHOLE: "embedding_rowwise"} if embeds else {_FEATURES: "rowwise", _WHOLE: "rowwise_split_input"}
        if source in known and target in (_WHOLE, _SEQUENCE):
            return known[source], {"sequence": target == _SEQUENCE}
        raise _refused(name, kind, f"from {source} to {target}")
    if kind == "SequenceParallel":
        dims = value.sequence_sharding
        if _layout(dims) == _SEQUENCE:
            return "sequence_parallel", {"sequence": True}
        raise _refused(name, kind, f"on {_layout(dims)}")
    if kind == "PrepareModuleInput":
        return "gather_sequence", _gathered(value, name)
    raise PlacementError(
        f"the plan gives {name!r} torch's style {kind}, which is not read; ColwiseParallel, RowwiseParallel, SequenceParallel "
        f"and PrepareModuleInput are",
        code="C060",
    )


def _gathered(value: Any, name: str) -> dict[str, Any]:
    """Which inputs are made whole along the sequence: places and names."""
    places = zip(value.input_layouts or (), value.desired_input_layouts or (), strict=False)
    names = {key: (layout, value.desired_input_kwarg_layouts[key]) for key, layout in value.input_kwarg_layouts.items()}
    found: dict[str, Any] = {"inputs": []}
    for key, (source, target) in [*enumerate(places), *names.items()]:
        before, after = _layout(source), _layout(target)
        if (before, after) == (_SEQUENCE, _WHOLE):
            found["inputs"].append(key)
        elif before != after:
            raise _refused(name, type(value).__name__, f"from {before} to {after}")
    return found


def _layout(layouts: Any) -> str:
    """A placement of torch's in the words of this file; of several, which a mesh of several dimensions has, the text."""
    one = layouts[0] if isinstance(layouts, (tuple, list)) and len(layouts) == 1 else layouts
    if one is None or type(one).__name__ == "Replicate":
        return _WHOLE if one is not None else "None"
    dim = getattr(one, "dim", None) if type(one).__name__ == "Shard" else None
    return {-1: _FEATURES, 2: _FEATURES, 1: _SEQUENCE, -2: _SEQUENCE}.get(dim, str(one))  # type: ignore[arg-type]


def _refused(name: str, kind: str, what: str) -> PlacementError:
    return PlacementError(
        f"the plan gives {name!r} torch's style {kind} {what}, which is not read; {_LAYOUTS}", code="C060"
    )
