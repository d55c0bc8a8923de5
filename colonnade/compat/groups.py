"""Initializers that create their groups themselves, and a gloo twin of every group."""

from __future__ import annotations

import json
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from colonnade.comm.groups import ProcessGroups
from colonnade.comm.messages import share_texts
from colonnade.context.build import NEEDS_WORLD, Build, read_groups
from colonnade.context.parallel_context import LaunchHook, ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import LayoutError

_twins: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def get_cpu_group(context: ParallelContext, mode: ParallelMode) -> dist.ProcessGroup:
    """The gloo twin of `context.get_group(mode)`; the same object where the backend already is gloo."""
    group = context.get_group(mode)
    return _twins.get(group, group)


class AncestralGroups(LaunchHook):
    """Runs `init_dist_group()` and its tuples (local_rank, size, group, cpu_group, ranks, mode)."""

    def adopt_groups(self, build: Build, groups: ProcessGroups) -> bool:
        waiting, build.waiting = build.waiting, []
        for initializer, source, mode, returned in waiting:
            if returned is NEEDS_WORLD:
                returned = (getattr(initializer, "init_dist_group", None) or initializer.init_parallel_groups)()
            made = returned if isinstance(returned, list) else [returned]
            if made and all(isinstance(item, tuple) and len(item) == 6 for item in made):
                for item in made:
                    _adopt(item, source, build, groups)
            else:
                build.add(read_groups(returned, initializer, source, mode), source)
        return bool(waiting)

    def after_groups(self, context: ParallelContext, groups: ProcessGroups) -> None:
        if dist.get_backend() != "gloo":
            for ranks in context.layout.rank_sets():
                twin = groups.create(ranks, "gloo", alone=False)
                if context.get_global_rank() in ranks:
                    _twins.setdefault(groups.group(ranks), twin)


def _adopt(made: tuple[Any, ...], source: str, build: Build, groups: ProcessGroups) -> None:
    """Use a group as this rank was given it; the layout learns the others from all ranks."""
    local_rank, size, group, cpu_group, ranks, mode = made
    if len(ranks) != size or not 0 <= local_rank < size:
        raise LayoutError(
            f"{source} returned local_rank={local_rank}, size={size} and ranks={ranks}, which disagree. The order is "
            f"(local_rank, group_world_size, process_group, cpu_group, ranks_in_group, mode)."
        )
    if dist.get_rank() not in ranks:
        raise LayoutError(f"{source} gave rank {dist.get_rank()} the group {ranks}, which it is not in")
    mode = ParallelMode(mode)
    texts = share_texts(f"groups/{mode.value}", json.dumps(list(ranks)), range(dist.get_world_size()))
    lists = sorted({tuple(json.loads(text)) for text in texts.values()})
    build.add({mode: [list(other) for other in lists]}, source)
    groups.adopt(tuple(ranks), group, lists)
    if cpu_group is not None and cpu_group is not group:
        _twins[group] = cpu_group
