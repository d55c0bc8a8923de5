"""From the `parallel` section of a config to the axes of a world of a given size."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any

from colonnade.config import AxisSpec, ParallelSizes, parallel_sizes
from colonnade.constants import INITIALIZER_MAPPING
from colonnade.context.grid import Grid
from colonnade.context.layout import Axis
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import LayoutError, did_you_mean, listed

_SHARDED = 3
"""The stage of ZeRO that has replicas of shards."""


def world_axes(config: Any, world_size: int) -> tuple[Axis, ...]:
    """The axes of the world, slowest first: data, pipeline, further axes in the config's order, tensor.

    With `zero.replicate`: that axis, pipeline, data, other further axes, tensor. Ranks are numbered host by host, so the ranks
    that share the shards of a model, which gather and scatter every layer, are then neighbours on one host, and their replicas,
    which only sum, lie on others. The data axis takes what the others leave over, unless the config fixes it; sizes that do not multiply
    to the world are an error that says which factor would fit.
    """
    if world_size < 1:
        raise LayoutError(f"a world has at least one rank, not {world_size}", code="C010")
    sizes = parallel_sizes(config)
    further = tuple(_further_axis(spec) for spec in sizes.axes)
    _check_one_axis_per_mode(sizes.tensor_mode, further)
    data = _data_size(sizes, further, world_size)
    replicas = tuple(axis for axis in further if axis.name == _replicate(config) and axis.data == "distinct")
    first = (
        Axis("data", data, ParallelMode.DATA, "distinct"),
        Axis("pipeline", sizes.pipeline, ParallelMode.PIPELINE, "same"),
    )
    return (
        *replicas,
        *(reversed(first) if replicas else first),
        *(axis for axis in further if axis not in replicas),
        Axis("tensor", sizes.tensor, ParallelMode.TENSOR, _tensor_data(sizes.tensor_mode)),
    )


@lru_cache(maxsize=4)
def grid_of(axes: tuple[Axis, ...]) -> Grid:
    """The grid of these axes; cached, because every initializer of a world asks for the same one."""
    return Grid(tuple((axis.name, axis.size) for axis in axes))


def check_mode(mode: str, where: str) -> str:
    """The initializer's registered name for a mode of the config; the mapping alone says what is allowed."""
    for key in (mode, mode.lower()):
        if key in INITIALIZER_MAPPING:
            return INITIALIZER_MAPPING[key]
    raise LayoutError(
        f"{where}: mode {mode!r} is not in INITIALIZER_MAPPING; allowed: {listed(INITIALIZER_MAPPING)}."
        f"{did_you_mean(mode, INITIALIZER_MAPPING)} A mode of your own is added with "
        f"colonnade.constants.INITIALIZER_MAPPING[{mode!r}] = 'YourInitializer'.",
        code="C010",
    )


def _replicate(config: Any) -> Any:
    """The axis on which the shards of stage 3 are replicas."""
    zero = config.get("zero")
    return zero.get("replicate") if isinstance(zero, Mapping) and zero.get("stage") == _SHARDED else None


def _further_axis(spec: AxisSpec) -> Axis:
    mode = ParallelMode(spec.mode or spec.name)
    return Axis(spec.name, spec.size, mode, mode.data)


def _check_one_axis_per_mode(tensor_mode: str | None, further: tuple[Axis, ...]) -> None:
    held = {"tensor": tensor_mode} if tensor_mode is not None else {}
    for axis in further:
        for other, mode in held.items():
            if axis.mode.value == mode:
                raise LayoutError(
                    f"parallel: the axes {other!r} and {axis.name!r} both have {axis.mode}; a mode belongs to one axis",
                    code="C010",
                )
        held[axis.name] = axis.mode.value


def _tensor_data(mode: str | None) -> Any:
    """Ranks of the tensor axis see the same data, unless its mode is one that declares otherwise."""
    return ParallelMode(mode).data if mode is not None and mode in ParallelMode else "same"


def _data_size(sizes: ParallelSizes, further: tuple[Axis, ...], world_size: int) -> int:
    named = {"pipeline": sizes.pipeline, **{axis.name: axis.size for axis in further}, "tensor": sizes.tensor}
    rest = prod(named.values())
    product = " x ".join(f"{name} {size}" for name, size in named.items() if size > 1) or "no other axis"
    if world_size % rest:
        near = sorted({rest * max(1, world_size // rest), rest * (world_size // rest + 1)})
        raise LayoutError(
            f"parallel: {product} = {rest} does not divide the world of {world_size} ranks. "
            f"What would fit: {_fitting(named, world_size)}a world of {listed(near)} ranks.",
            code="C010",
        )
    left = world_size // rest
    if sizes.data is not None and sizes.data != left:
        raise LayoutError(
            f"parallel: data {sizes.data} x {product} = {sizes.data * rest} is not the world of {world_size} "
            f"ranks; data={left} would fit. Leave `data` out and it takes what is left.",
            code="C010",
        )
    return left


def _fitting(named: dict[str, int], world_size: int) -> str:
    """One change each that would make the sizes divide the world: "tensor=2, or "."""
    rest = prod(named.values())
    changes = []
    for name, size in named.items():
        largest, remainder = divmod(world_size, rest // size)
        if largest and not remainder:
            best = min((d for d in range(1, largest + 1) if largest % d == 0), key=lambda d: (abs(d - size), d))
            changes.append(f"{name}={best}, or ")
    return "".join(changes)
