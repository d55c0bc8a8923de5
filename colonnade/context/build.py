"""From a config to a layout: which initializers a world needs, and what they return, checked and joined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from colonnade.config import parallel_sizes
from colonnade.constants import INITIALIZER_MAPPING
from colonnade.context.dist_group_initializer.base import ModeGroups, ProcessGroupInitializer
from colonnade.context.grid import Partition
from colonnade.context.layout import Layout, check_groups
from colonnade.context.parallel_mode import ParallelMode
from colonnade.context.sizes import check_mode, grid_of, world_axes
from colonnade.errors import LayoutError, listed
from colonnade.registry import DIST_GROUP_INITIALIZER


@dataclass(frozen=True)
class ReadyGroup:
    """A group that an initializer of the ancestor's kind created by itself, as seen by this rank."""

    mode: ParallelMode
    ranks: list[int]
    group: Any
    cpu_group: Any


@dataclass
class Build:
    """What the initializers gave: groups of the whole world, and initializers that need a running world."""

    groups: ModeGroups = field(default_factory=dict)
    sources: dict[ParallelMode, str] = field(default_factory=dict)
    waiting: list[tuple[Any, str, str]] = field(default_factory=list)
    ready: list[tuple[ReadyGroup, str]] = field(default_factory=list)

    def add(self, found: ModeGroups, source: str) -> None:
        for mode, groups in found.items():
            if mode in self.groups and self.groups[mode] != groups:
                raise LayoutError(
                    f"{source} and {self.sources[mode]} both define {mode}, with different groups. "
                    f"Remove one from `parallel`, or register a mode of its own for it."
                )
            self.groups[mode] = groups
            self.sources[mode] = source

    def take(self, returned: Any, initializer: Any, source: str, mode: str) -> None:
        """Add whatever an initializer returned: groups of the whole world, or groups that it made itself."""
        tuples = returned if isinstance(returned, list) else [returned]
        if tuples and all(isinstance(item, tuple) and len(item) == 6 for item in tuples):
            self.ready.extend((_ready(item, source), source) for item in tuples)
        else:
            self.add(read_groups(returned, initializer, source, mode), source)

    def finish_waiting(self) -> None:
        """Run the initializers that create groups themselves, now that there is a world to create them in."""
        for initializer, source, mode in self.waiting:
            method = getattr(initializer, "init_dist_group", None) or initializer.init_parallel_groups
            self.take(method(), initializer, source, mode)
        self.waiting.clear()


def build_layout(config: Any, world_size: int, rank: int = 0) -> Layout:
    """The layout of a world of this size, with no process group and no torch.

    An initializer that creates its own groups cannot be planned this way; it is an error that names it.
    """
    axes = world_axes(config, world_size)
    build = run_initializers(config, world_size, rank)
    by_itself = [source for _, source, _ in build.waiting] + [source for _, source in build.ready]
    if by_itself:
        raise LayoutError(
            f"{by_itself[0]} creates process groups itself, so its layout is known only in a running "
            f"world. Let init_parallel_groups() return {{mode: [[ranks], ...]}} instead."
        )
    return Layout(axes, build.groups)


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
        if returned is _NEEDS_WORLD:
            build.waiting.append((initializer, source, mode))
        else:
            build.take(returned, initializer, source, mode)
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
            f"{source} returned {returned!r}; return {{mode: [[ranks], ...]}}, or None if it adds nothing"
        )
    found: ModeGroups = {}
    for key, groups in returned.items():
        if not isinstance(groups, Partition) and not _is_list_of_rank_lists(groups):
            raise LayoutError(f"{source} returned {groups!r} for {key}; a mode's groups are a list of rank lists")
        found[ParallelMode(key)] = groups if isinstance(groups, Partition) else [list(group) for group in groups]
    for known, lists in found.items():
        whole = getattr(initializer, "whole_world", True)
        check_groups(known, lists, initializer.world_size, source, whole)
    return found


_NEEDS_WORLD = object()


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
            f"The first six arguments come by position; every further one must stand in the config beside `mode`."
        ) from error


def _call(initializer: Any) -> Any:
    """Run a pure initializer; one that needs a process group is told apart and runs later."""
    if not _has_own(initializer, "init_parallel_groups"):
        if not hasattr(initializer, "init_dist_group"):
            raise LayoutError(
                f"{type(initializer).__name__} defines neither init_parallel_groups() nor init_dist_group()"
            )
        return _NEEDS_WORLD
    try:
        returned = initializer.init_parallel_groups()
    except (RuntimeError, ValueError) as error:
        if "process group has not been initialized" in str(error):
            return _NEEDS_WORLD
        raise
    return returned


def _has_own(initializer: Any, method: str) -> bool:
    return getattr(type(initializer), method, None) is not getattr(ProcessGroupInitializer, method, None)


def _is_list_of_rank_lists(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, (list, tuple, range)) for item in value)


def _ready(item: tuple[Any, ...], source: str) -> ReadyGroup:
    local_rank, size, group, cpu_group, ranks, mode = item
    if len(ranks) != size or not 0 <= local_rank < size:
        raise LayoutError(
            f"{source} returned local_rank={local_rank}, size={size} and ranks={ranks}, which disagree. The order is "
            f"(local_rank, group_world_size, process_group, cpu_group, ranks_in_group, mode)."
        )
    return ReadyGroup(ParallelMode(mode), list(ranks), group, cpu_group)
