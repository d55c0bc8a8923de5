"""Styles: what a plan can say of a layer. Each cuts the layer's parameters and gives it a forward pass for the parts."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn

from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError, did_you_mean, listed
from colonnade.nn.layer.arrangement import Split, arrange
from colonnade.nn.layer.first_pass import gives, takes
from colonnade.nn.layer.linear import own
from colonnade.parallel.placement import Shard, placement_of
from colonnade.plans.match import Target

Style = Callable[[Target], None]

_TENSOR = ParallelMode.TENSOR

STYLES: dict[str, tuple[Style, ParallelMode]] = {}
"""Styles by name, each with the mode that it is for: where that has one rank, nothing is cut."""


def style(*names: str, mode: ParallelMode = _TENSOR) -> Callable[[Style], Style]:
    """Register a style under these names."""

    def register(function: Style) -> Style:
        STYLES.update(dict.fromkeys(names, (function, mode)))
        return function

    return register


def style_of(name: Any, where: str) -> tuple[Style, ParallelMode]:
    """The style of this name and its mode; refuses others."""
    if name not in STYLES:
        raise PlacementError(
            f"the plan gives {where!r} the style {name!r}, which is not known; styles are {listed(sorted(STYLES))}."
            f"{did_you_mean(str(name), STYLES)}"
        )
    return STYLES[name]


@style("colwise")
def colwise(target: Target) -> None:
    """This rank's output features of a linear layer, for a whole input: they stay split, until a `rowwise` layer."""
    if target.parameter is not None:
        cut(target, target.parameter, max(_weight(target).dim() - 2, 0))
        return
    _cut_linear(target, "column")


@style("rowwise")
def rowwise(target: Target) -> None:
    """This rank's input features of a linear layer, which takes what a `colwise` one gives; results are summed."""
    if target.parameter is not None:
        if _weight(target).dim() > 1:
            cut(target, target.parameter, _weight(target).dim() - 1)
        return
    _cut_linear(target, "row")


def cut(target: Target, name: str, dim: int, mode: ParallelMode = _TENSOR) -> nn.Parameter:
    """Replace the parameter `name` of the target's module by this rank's part of it along `dim`, and place that."""
    whole: Any = getattr(target.module, name)
    ranks, at = target.context.get_world_size(mode), target.context.get_local_rank(mode)
    if whole.shape[dim] % ranks:
        raise PlacementError(
            f"{target.name!r}: dimension {dim} of {name!r}, of shape {tuple(whole.shape)}, cannot be cut evenly over the "
            f"{ranks} ranks of {mode}; choose a size that {ranks} divides, another tensor size, or leave it out of the plan"
        )
    spec = Shard(dim)
    part = target.parts.get(whole)
    if part is None:
        each = whole.shape[dim] // ranks
        part = own(whole.detach().narrow(dim, at * each, each), {mode: spec}, tuple(whole.shape), whole)
        target.parts[whole] = part
    elif placement_of(part).shards != {mode: spec}:
        raise PlacementError(
            f"{target.name!r} shares {name!r} with another layer that the plan cuts otherwise ({placement_of(part)} there, "
            f"{spec} on {mode} here); give both layers styles that cut the weight alike, or untie them"
        )
    setattr(target.module, name, part)
    return part


def _cut_linear(target: Target, split: Split) -> None:
    module: Any = target.module
    here = arrange(target.context)
    transposed = type(module).__name__ == "Conv1D"
    if not transposed and not isinstance(module, nn.Linear):
        raise PlacementError(
            f"{target.name!r} is a {type(module).__name__}; the style is for nn.Linear. Name a layer inside it, or a parameter"
        )
    outputs, inputs = (1, 0) if transposed else (0, 1)
    features = module.weight.shape[inputs]
    cut(target, "weight", outputs if split == "column" else inputs)
    if split == "column" and module.bias is not None:
        cut(target, "bias", 0)

    def forward(self: Any, x: Tensor) -> Tensor:
        takes(self, here, x, "outer" if split == "column" else "inner", features)
        y = here.linear(x, self.weight.t() if transposed else self.weight, self.bias, split)
        return gives(self, here, y, here.target(split))

    set_forward(target, forward)


def set_forward(target: Target, forward: Callable[..., Any]) -> None:
    """Give the target's module another forward pass, a function of the module and its arguments.

    Bound as a method, so that a deep copy of the model computes with its own weights.
    """
    target.module.arrangement = arrange(target.context)  # type: ignore[assignment]
    target.module.forward = MethodType(forward, target.module)


def _weight(target: Target) -> Tensor:
    assert target.parameter is not None
    return getattr(target.module, target.parameter)
