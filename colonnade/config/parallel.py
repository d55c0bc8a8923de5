"""The typed reading of `parallel`: what the context asks of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from colonnade.config.check import require_valid
from colonnade.config.problems import Source

_BUILT_IN = ("data", "pipeline", "tensor", "expert")


@dataclass(frozen=True)
class AxisSpec:
    """One axis: its name in `parallel`, its size, its mode, and the arguments of the mode's initializer."""

    name: str
    size: int
    mode: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ParallelSizes:
    """The sizes that a config asks for.

    `data` is None where it is whatever the other axes leave. `axes` are the further ones in the order they
    were written: `sequence` and the user's own.
    """

    data: int | None = None
    pipeline: int = 1
    tensor: int = 1
    tensor_mode: str | None = None
    tensor_kwargs: dict[str, Any] = field(default_factory=dict)
    expert: AxisSpec | None = None
    axes: tuple[AxisSpec, ...] = ()


def least_world(config: Mapping[str, Any]) -> int:
    """One replica of everything else, or two so that there is something to sum; more where experts lie on data ranks."""
    sizes = parallel_sizes(config)
    rest = sizes.pipeline * sizes.tensor * prod(axis.size for axis in sizes.axes)
    expert = sizes.expert.size if sizes.expert is not None else 1
    return rest * (sizes.data or max(2, expert))


def parallel_sizes(config: Mapping[str, Any]) -> ParallelSizes:
    """Read `config["parallel"]`; a key left out or None has size 1, and `data` takes what is left.

    A `parallel` that cannot be used is a ConfigError, as when the config was loaded.
    """
    parallel = config.get("parallel")
    require_valid({"parallel": parallel}, Source())
    parallel = parallel or {}
    tensor = _axis("tensor", parallel.get("tensor"))
    return ParallelSizes(
        data=_data_size(parallel.get("data")),
        pipeline=_axis("pipeline", parallel.get("pipeline")).size,
        tensor=tensor.size,
        tensor_mode=tensor.mode,
        tensor_kwargs=tensor.kwargs,
        expert=None if parallel.get("expert") is None else _axis("expert", parallel["expert"]),
        axes=tuple(
            _axis(name, value) for name, value in parallel.items() if name not in _BUILT_IN and value is not None
        ),
    )


def _axis(name: str, value: Any) -> AxisSpec:
    """An axis from its checked value: a size, None for size 1, or a dict."""
    if not isinstance(value, Mapping):
        return AxisSpec(name, 1 if value is None else int(value))
    kwargs = {key: item for key, item in value.items() if key not in ("size", "mode")}
    return AxisSpec(name, int(value["size"]), value.get("mode"), kwargs)


def _data_size(value: Any) -> int | None:
    size = value["size"] if isinstance(value, Mapping) else value
    return None if size in (None, -1, "auto") else int(size)
