"""TP plans, and the modules and parameters that their patterns match.

`resolve` turns a TP plan into one `PlanEntry` per name; `plan_checks.py` checks these entries, and `parallelize.py` passes a
`Target` for each to its style (`styles.py`). Values of a TP plan may be styles of torch's `parallelize_module`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import PlacementError, did_you_mean, listed
from colonnade.nn.layer.arrangement import Arrangement, arrange
from colonnade.texts import pattern_of

ParallelizePlan = Mapping[str, Any]
"""Pattern -> style. `*` stands for one component of a dotted name: "blocks.*.fc1".

A style is a name, a style of torch (`ColwiseParallel()`), or a mapping with the name under "style" plus options of that
style. The option "divide", allowed without a style too, lists attributes of the module (number of heads, width) that are
divided by the tensor size.
"""


@dataclass(frozen=True, eq=False)
class Target:
    """A module, or one of its parameters, that a style is applied to."""

    name: str
    """The full dotted name of the module or of the parameter."""
    module: nn.Module
    """The module, or the module that owns the parameter."""
    parameter: str | None
    """The parameter's name in its owner; None if the pattern names a module."""
    model: nn.Module
    """The full model, or the pipeline stage that contains the module."""
    context: ParallelContext
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the style, for example `sections`."""
    shards: MutableMapping[nn.Parameter, nn.Parameter] = field(default_factory=WeakIdKeyDictionary)
    """Full parameter -> its shard, so that two layers that share a parameter share the shard too."""

    @property
    def arrangement(self) -> Arrangement:
        """The arrangement of activations around this module, with the entry's own `sequence` option."""
        return arrange(self.context, self.options.get("sequence"))

    @property
    def parent(self) -> nn.Module | None:
        """The parent of the module."""
        owner = self.name if self.parameter is None else self.name.rpartition(".")[0]
        return self.model.get_submodule(owner.rpartition(".")[0]) if owner else None


@dataclass(frozen=True)
class PlanEntry:
    """The style and options of one module or parameter, and the pattern that they come from."""

    pattern: str
    style: Any
    options: Mapping[str, Any]


def resolve(plan: ParallelizePlan, model: nn.Module) -> dict[str, PlanEntry]:
    """An entry for each module and parameter that the TP plan matches.

    Parameters come before modules: a style of a module reads how its parameters are sharded.
    """
    if not isinstance(plan, Mapping):
        raise PlacementError(f"a TP plan is a mapping of patterns to styles, not {plan!r}", code="C060")
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, PlanEntry] = {}
    for pattern, value in plan.items():
        names = [name for name in (*parameters, *modules) if fits(pattern, name)]
        if not names:
            known = list(dict.fromkeys(map(pattern_of, (*modules, *parameters))))
            # Names with the same last component are the likely ones: the mistake is mostly in the path.
            shown = [name for name in known if name.rpartition(".")[2] == pattern.rpartition(".")[2]] or known
            raise PlacementError(
                f"the TP plan's pattern {pattern!r} matches no module and no parameter; a '*' stands for one component of a "
                f"dotted name. Names are {listed(shown[:8])}{' ...' if len(shown) > 8 else ''}.{did_you_mean(pattern, known)}",
                code="C060",
            )
        for name in names:
            entry = PlanEntry(pattern, value, {})
            if isinstance(value, Mapping):
                options = dict(value)
                entry = PlanEntry(pattern, options.pop("style", None), options)
            elif is_torch_style(value) and name in modules:
                entry = PlanEntry(pattern, *from_torch(value, modules[name], name))
            other = found.setdefault(name, entry)
            if (other.style, dict(other.options)) != (entry.style, dict(entry.options)):
                raise PlacementError(
                    f"the TP plan gives {name!r} two styles: {other.pattern!r} has {plan[other.pattern]!r}, and {pattern!r} "
                    f"has {value!r}; let only one pattern match it",
                    code="C060",
                )
    return {name: found[name] for name in (*parameters, *modules) if name in found}


def place_of(name: str, model: nn.Module) -> tuple[nn.Module, str | None]:
    """(module, None) for the name of a module; (owner, name in the owner) for that of a parameter."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    return (module, last) if last in module._parameters else (model.get_submodule(name), None)


def fits(pattern: str, name: str) -> bool:
    """Whether a name matches a pattern, component by component."""
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted))


# --- Styles of torch's `parallelize_module`, translated by class name, so that DTensor is not imported ---

_MODULE = "torch.distributed.tensor."
_FULL, _FEATURES, _SEQUENCE = "Replicate()", "Shard(-1)", "Shard(1)"


def is_torch_style(value: Any) -> bool:
    """Whether the value is a style of torch."""
    return type(value).__module__.startswith(_MODULE)


def from_torch(value: Any, module: nn.Module, name: str) -> tuple[str, dict[str, Any]]:
    """The style, and its options, that a style of torch stands for on this module."""
    kind = type(value).__name__
    embeds = isinstance(module, nn.Embedding)
    if kind == "ColwiseParallel":
        source, target = _layout(value.input_layouts), _layout(value.output_layouts)
        known = {_FEATURES: "colwise", _FULL: "embedding_colwise" if embeds else "colwise_gather_output"}
        if source in (_FULL, _SEQUENCE) and target in known and not (embeds and source == _SEQUENCE):
            return known[target], {"sequence": source == _SEQUENCE}
        raise _unsupported(name, kind, f"from {source} to {target}")
    if kind == "RowwiseParallel":
        source, target = _layout(value.input_layouts), _layout(value.output_layouts)
        known = {_FULL: "embedding_rowwise"} if embeds else {_FEATURES: "rowwise", _FULL: "rowwise_split_input"}
        if source in known and target in (_FULL, _SEQUENCE):
            return known[source], {"sequence": target == _SEQUENCE}
        raise _unsupported(name, kind, f"from {source} to {target}")
    if kind == "SequenceParallel":
        dims = value.sequence_sharding
        if _layout(dims) == _SEQUENCE:
            return "sequence_parallel", {"sequence": True}
        raise _unsupported(name, kind, f"on {_layout(dims)}")
    if kind == "PrepareModuleInput":
        # Inputs that torch would redistribute from sequence shards to full tensors, by position and by keyword.
        positional = zip(value.input_layouts or (), value.desired_input_layouts or (), strict=False)
        keywords = {
            key: (layout, value.desired_input_kwarg_layouts[key]) for key, layout in value.input_kwarg_layouts.items()
        }
        inputs: list[Any] = []
        for key, layouts in [*enumerate(positional), *keywords.items()]:
            source, target = map(_layout, layouts)
            if (source, target) == (_SEQUENCE, _FULL):
                inputs.append(key)
            elif source != target:
                raise _unsupported(name, kind, f"from {source} to {target}")
        return "gather_sequence", {"inputs": inputs}
    raise PlacementError(
        f"the TP plan gives {name!r} torch's style {kind}, which is not supported; supported are ColwiseParallel, "
        f"RowwiseParallel, SequenceParallel and PrepareModuleInput",
        code="C060",
    )


def _layout(layouts: Any) -> str:
    """A placement of torch as one of the three constants above; other placements as their own text."""
    layout = layouts[0] if isinstance(layouts, (tuple, list)) and len(layouts) == 1 else layouts
    if layout is None or type(layout).__name__ == "Replicate":
        return _FULL if layout is not None else "None"
    dim = getattr(layout, "dim", None) if type(layout).__name__ == "Shard" else None
    return {-1: _FEATURES, 2: _FEATURES, 1: _SEQUENCE, -2: _SEQUENCE}.get(dim, str(layout))  # type: ignore[arg-type]


def _unsupported(name: str, kind: str, layouts: str) -> PlacementError:
    return PlacementError(
        f"the TP plan gives {name!r} torch's style {kind} {layouts}, which is not supported; activations are [batch, "
        f"sequence, features], so layouts are {_FULL}, {_FEATURES} and {_SEQUENCE}",
        code="C060",
    )
