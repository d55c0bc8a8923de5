"""Run scripts written for Colossal-AI: `install()` makes `import colossalai` resolve to colonnade.

The alias is the same module object, not a copy: `colossalai.constants.INITIALIZER_MAPPING` *is* ours. What only such
scripts need is here too: their spelling of keys and hooks, initializers that create their groups themselves, and a gloo
twin of every group.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from colonnade.comm.groups import ProcessGroups
from colonnade.comm.messages import share_texts
from colonnade.config.words import ALIASES
from colonnade.context.build import NEEDS_WORLD, Build, read_groups
from colonnade.context.parallel_context import LaunchHook, ParallelContext, launch_hooks
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ColonnadeError, LayoutError
from colonnade.registry import HOOKS
from colonnade.trainer import hooks

_ALIAS = "colossalai"
_HOME = "colonnade"
_MOVED = {f"{_HOME}.context.process_group_initializer": f"{_HOME}.context.dist_group_initializer"}
"""Modules of the ancestor that have another name here."""
_KEYS = {"NUM_MICRO_BATCHES": "num_microbatches"}


class _AliasLoader(importlib.abc.Loader):
    def __init__(self, home: str) -> None:
        self._home = home
        self._spec: Any = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._home)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just put the alias's spec on the module; it stays what it is.
        module.__spec__ = self._spec


class _AliasFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _ALIAS and not fullname.startswith(f"{_ALIAS}."):
            return None
        home = _HOME + fullname[len(_ALIAS) :]
        home = _MOVED.get(home, home)
        try:
            found = importlib.util.find_spec(home)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, _AliasLoader(home), is_package=is_package)


class _SaveCheckpointHook(hooks.SaveCheckpointHook):
    def __init__(
        self,
        interval: int = 1,
        checkpoint_dir: str = "checkpoints",
        model: Any = None,
        save_by_iter: bool = False,
        priority: int = 100,
        **options: Any,
    ) -> None:
        folder = options.pop("folder", checkpoint_dir)
        super().__init__(interval, folder, model, **{"by_epoch": not save_by_iter, "priority": priority, **options})


class _LoadCheckpointHook(hooks.LoadCheckpointHook):
    def __init__(self, checkpoint_dir: str = "checkpoints", *args: Any, **options: Any) -> None:
        super().__init__(options.pop("folder", checkpoint_dir), *args, **options)


class _TensorboardHook(hooks.TensorBoardHook):
    def __init__(self, log_dir: str, *args: Any, **options: Any) -> None:
        super().__init__(log_dir, *args, **options)


_HOOKS: dict[str, type[hooks.BaseHook]] = {
    "SaveCheckpointHook": _SaveCheckpointHook,
    "LoadCheckpointHook": _LoadCheckpointHook,
    "TensorboardHook": _TensorboardHook,
}
_ours = {name: getattr(hooks, name, None) for name in _HOOKS}


def _spell(spelling: dict[str, Any]) -> None:
    """Let these hooks be what their names mean; None: nothing."""
    for name, hook in spelling.items():
        if name in HOOKS:
            HOOKS.remove(name)
        if hook is None:
            delattr(hooks, name)
        else:
            setattr(hooks, name, HOOKS.register_module(name)(hook))


def get_cpu_group(context: ParallelContext, mode: ParallelMode) -> dist.ProcessGroup:
    """The gloo twin of `context.get_group(mode)`; the same object where the backend already is gloo."""
    group = context.get_group(mode)
    return _twins.get(group, group)


_twins: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


class _AncestralGroups(LaunchHook):
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
                twin = groups.create(ranks, "gloo")
                if context.get_global_rank() in ranks:
                    _twins.setdefault(groups.group(ranks), twin)


_hook = _AncestralGroups()


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


def install() -> None:
    """Make `colossalai` and every submodule path an alias of `colonnade`. Refuses if a real one is installed.

    From then on a config may also use the names that its keys had there. Launches that follow take initializers of the
    ancestor's kind, and make the groups of `get_cpu_group`.
    """
    if any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        return
    real = importlib.util.find_spec(_ALIAS) if _ALIAS not in sys.modules else sys.modules[_ALIAS].__spec__
    if real is not None:
        raise ColonnadeError(
            f"a real {_ALIAS} is installed at {real.origin}; the alias would hide it. "
            f"Uninstall it, or import {_HOME} by its own name."
        )
    sys.meta_path.insert(0, _AliasFinder())
    ALIASES.update(_KEYS)
    _spell(_HOOKS)
    launch_hooks.append(_hook)
    ParallelContext.get_cpu_group = get_cpu_group  # type: ignore[attr-defined]


def uninstall() -> None:
    """Take the alias away again, and what came with it."""
    if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        return
    _spell(_ours)
    if _hook in launch_hooks:
        launch_hooks.remove(_hook)
        del ParallelContext.get_cpu_group  # type: ignore[attr-defined]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AliasFinder)]
    for name in [name for name in sys.modules if name == _ALIAS or name.startswith(f"{_ALIAS}.")]:
        del sys.modules[name]
    for key in _KEYS:
        ALIASES.pop(key, None)
