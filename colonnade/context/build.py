"""From a config to a layout: which initializers a world needs, and what they return, checked and joined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from colonnade.config import parallel_sizes
from colonnade.constants import INITIALIZER_MAPPING
from colonnade.context.dist_group_initializer.base import ModeGroups, ProcessGroupInitializer
from colonnade.context.grid import Partition
from colonnade.context.layout import Layout, check_groups
from colonnade.context.parallel_mode import ParallelMode
from colonnade.context.places import layout_of
from colonnade.context.sizes import check_mode, grid_of, world_axes
from colonnade.errors import LayoutError, listed
from colonnade.registry import DIST_GROUP_INITIALIZER


class Waiting(NamedTuple):
    """An initializer that creates its groups itself, so only in a running world: `colonnade.compat` takes it on."""

    initializer: Any
    source: str
    mode: str
    returned: Any


@dataclass
class Build:
    """What the initializers gave: groups of the whole world, and initializers that need a running world."""

    groups: ModeGroups = field(default_factory=dict)
    sources: dict[ParallelMode, str] = field(default_factory=dict)
    waiting: list[Waiting] = field(default_factory=list)

    def add(self, found: ModeGroups, source: str) -> None:
        for mode, groups in found.items():
            if mode in self.groups and self.groups[mode] != groups:
                raise LayoutError(
                    f"{source} and {self.sources[mode]} both define {mode}, with different groups. "
                    f"Remove one from `parallel`, or register a mode of its own for it.",
                    code="C011",
                )
            self.groups[mode] = groups
            self.sources[mode] = source

    def refuse_waiting(self) -> None:
        """Initializers that create groups themselves are an error where nobody takes them on."""
        if self.waiting:
            raise LayoutError(
                f"{self.waiting[0].source} creates process groups itself, so its layout is known only in a running world. "
                f"Let init_parallel_groups() return {{mode: [[ranks], ...]}} instead, or call colonnade.compat.install() "
                f"before launch to run it as it is.",
                code="C011",
            )


def build_layout(config: Any, world_size: int) -> Layout:
    """The layout of a world of this size, with no process group and no torch.

    An initializer that creates its own groups cannot be planned this way; it is an error that names it.
    """
    axes = world_axes(config, world_size)
    build = run_initializers(config, world_size, rank=0)
    build.refuse_waiting()
    return layout_of(axes, build.groups, parallel_sizes(config).tensor_mode)


def run_initializers(config: Any, world_size: int, rank: int) -> Build:
    """Run every initializer that the config asks for, in the documented order."""
    grid = grid_of(world_axes(config, world_size))
    six = (rank, world_size, config, grid.sizes["data"], grid.sizes["pipeline"], grid.sizes["tensor"])
    build = Build()
    build.add({ParallelMode.GLOBAL: grid.groups(*grid.sizes)}, "the world")
    for mode, registered, kwargs in _wanted(config):
        initializer = _construct(registered, mode, six, kwargs)
        source = f"{registered} (mode {mode!r})"
        returned = _call(initializer)
        if returned is NEEDS_WORLD or _is_made(returned):
            build.waiting.append(Waiting(initializer, source, mode, returned))
        else:
            build.add(read_groups(returned, initializer, source, mode), source)
    _add_plain_axes(build, config, world_size)
    return build


def read_groups(returned: Any, initializer: Any, source: str, mode: str) -> ModeGroups:
    """Check and normalise what an initializer returned: a dict, a list of rank lists, or None."""
    if returned is None:
        return {}
    if _is_list_of_rank_lists(returned):
        returned = {ParallelMode(mode): returned}
    if not isinstance(returned, dict):
        raise LayoutError(
            f"{source} returned {returned!r}; return {{mode: [[ranks], ...]}}, or None if it adds nothing", code="C011"
        )
    found: ModeGroups = {}
    for key, groups in returned.items():
        if not isinstance(groups, Partition) and not _is_list_of_rank_lists(groups):
            raise LayoutError(
                f"{source} returned {groups!r} for {key}; a mode's groups are a list of rank lists", code="C011"
            )
        found[ParallelMode(key)] = groups if isinstance(groups, Partition) else [list(group) for group in groups]
    for known, lists in found.items():
        whole = getattr(initializer, "whole_world", True)
        check_groups(known, lists, initializer.world_size, source, whole)
    return found


NEEDS_WORLD = object()


def _wanted(config: Any) -> Iterable[tuple[str, str, dict[str, Any]]]:
    """(mode of the config, registered initializer, its own arguments), in order."""
    sizes = parallel_sizes(config)
    for mode in ("data", "model", "pipeline", "tensor"):
        yield mode, check_mode(mode, "parallel"), {}
    if sizes.tensor_mode is not None:
        yield (
            sizes.tensor_mode,
            check_mode(sizes.tensor_mode, "parallel.tensor"),
            dict(sizes.tensor_kwargs),
        )
    if sizes.expert is not None:
        yield (
            "expert",
            check_mode("expert", "parallel.expert"),
            {"size": sizes.expert.size, **sizes.expert.kwargs},
        )
    for axis in sizes.axes:
        mode = axis.mode or axis.name
        if axis.kwargs or _mapped(mode):
            yield mode, check_mode(mode, f"parallel.{axis.name}"), dict(axis.kwargs)


def _mapped(mode: str) -> bool:
    return mode in INITIALIZER_MAPPING or mode.lower() in INITIALIZER_MAPPING


def _add_plain_axes(build: Build, config: Any, world_size: int) -> None:
    """A further axis whose initializer (if any) says nothing about its mode is grouped by the axis itself."""
    axes = world_axes(config, world_size)
    for axis in axes:
        if axis.mode not in build.groups:
            build.add({axis.mode: grid_of(axes).groups(axis.name)}, f"axis {axis.name!r}")


def _construct(registered: str, mode: str, six: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    initializer = DIST_GROUP_INITIALIZER.get_module(registered)
    try:
        return initializer(*six, **kwargs)
    except TypeError as error:
        given = listed(f"{key}=" for key in kwargs)
        raise LayoutError(
            f"parallel, mode {mode!r}: {registered} could not be built with its own arguments ({given}): {error}. "
            f"The first six arguments come by position; every further one must stand in the config beside `mode`.",
            code="C011",
        ) from error


def _call(initializer: Any) -> Any:
    """Run a pure initializer; one that needs a process group is told apart and runs later."""
    own = getattr(type(initializer), "init_parallel_groups", None)
    if own in (None, ProcessGroupInitializer.init_parallel_groups):
        if not hasattr(initializer, "init_dist_group"):
            raise LayoutError(
                f"{type(initializer).__name__} defines neither init_parallel_groups() nor init_dist_group()",
                code="C011",
            )
        return NEEDS_WORLD
    try:
        returned = initializer.init_parallel_groups()
    except (RuntimeError, ValueError) as error:
        if "process group has not been initialized" in str(error):
            return NEEDS_WORLD
        raise
    return returned


def _is_list_of_rank_lists(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, (list, tuple, range)) for item in value)


def _is_made(returned: Any) -> bool:
    """Whether these are groups that exist: tuples as Colossal-AI's initializers return them, one or several."""
    made = returned if isinstance(returned, list) else [returned]
    return bool(made) and all(isinstance(item, tuple) and len(item) == 6 for item in made)
