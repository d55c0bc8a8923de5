"""Styles of torch's `parallelize_module` as values of a plan: read into ours, without importing DTensor."""

from __future__ import annotations

from typing import Any

from torch import nn

from colonnade.errors import PlacementError

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
