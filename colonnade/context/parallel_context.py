"""ParallelContext: what one process knows about its world. Groups, ranks and sizes by mode; seeds; the device."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from colonnade import logging as _logging
from colonnade.comm.groups import NoGroups, ProcessGroups
from colonnade.comm.messages import gather_json, is_same_everywhere
from colonnade.comm.torch_versions import DEFAULT_TIMEOUT, START_UP_TIMEOUT, waiting_at_most
from colonnade.comm.waits import WaitWatch
from colonnade.config import Config, load_config, parallel_sizes
from colonnade.config.config import compared_texts
from colonnade.context.layout import Axis, Layout, world_axes
from colonnade.context.layout_builder import Build, build_layout, layout_of, run_initializers
from colonnade.context.parallel_mode import ParallelMode, mode_of
from colonnade.context.random import RandomStreams, derive_seed
from colonnade.context.rendezvous import agree_on_layout, device_for, join_world, leave_world, share_start_up_errors
from colonnade.errors import ContextError, listed

# --------------------------------------------------------------------------------------------------
# Modes as a torch DeviceMesh, so that DTensor, FSDP2 and the like take a ParallelContext.
# --------------------------------------------------------------------------------------------------


def mesh_of(
    layout: Layout,
    modes: list[ParallelMode],
    groups: list[dist.ProcessGroup],
    rank: int,
    device_type: str,
) -> DeviceMesh:
    """A mesh whose dimensions are `modes`, outermost first, named by their values; creates no group."""
    if not modes:
        raise ContextError("device_mesh() needs at least one mode, such as device_mesh(ParallelMode.DATA)", code="C012")
    names = tuple(mode.value for mode in modes)
    ranks = torch.tensor(_product(layout, modes, rank), device="cpu")
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)


def _product(layout: Layout, modes: list[ParallelMode], rank: int) -> Any:
    """Nested lists of ranks: from this rank along every mode; refuses modes that do not form a grid."""
    grid = _walk(layout, modes, rank)
    flat = torch.tensor(grid, device="cpu").flatten().tolist()
    if len(set(flat)) != len(flat) or any(_walk(layout, modes, other) != grid for other in flat):
        raise ContextError(
            f"the modes {listed(mode.name for mode in modes)} do not form a grid around rank {rank}: "
            f"walking along them reaches {flat}. Use modes that vary independently.",
            code="C012",
        )
    return grid


def _walk(layout: Layout, modes: list[ParallelMode], start: int) -> Any:
    if not modes:
        return start
    mode, *inner = modes
    return [_walk(layout, inner, rank) for rank in layout.group_of(mode, start)]


class LaunchHook:
    """Takes part in every launch of this process while it is in `launch_hooks`."""

    def adopt_groups(self, build: Build, groups: ProcessGroups) -> bool:
        """In the joined world, before the layout is final: take on what waits in `build`; whether there was anything."""
        return False

    def after_groups(self, context: ParallelContext, groups: ProcessGroups) -> None:
        """When the groups of every mode are there. Collective over the world."""


launch_hooks: list[LaunchHook] = []


class ParallelContext:
    """The world of this process. Usable as a context manager; several may live one after another.

    Before `launch` it is a world of one rank. After `destroy()` (or the end of the `with` block) it is a
    world of one again: groups, sockets, random streams, sizes and the config are gone. The random generators of torch,
    Python and numpy stay as they are.
    """

    config: Config
    device: torch.device
    streams: RandomStreams
    waits: WaitWatch
    world_size: int
    seed: int
    virtual_pipeline_parallel_size: int | None
    virtual_pipeline_parallel_rank: int | None
    is_simulated: bool
    """Whether there are no other processes: what depends on other ranks' data is assumed to be spread evenly."""
    _launched: bool
    _axes: tuple[Axis, ...]
    _build: Build
    _timeout: timedelta | None
    _groups: ProcessGroups | NoGroups | None

    def __init__(self) -> None:
        self.verbose = True
        self._reset()

    # -- life ---------------------------------------------------------------------------------------------

    def load_config(self, config: Config | dict[str, Any] | str | Path) -> None:
        """Load and check the configuration; `launch` does this."""
        self.config = load_config(config)

    def init_global_dist(
        self,
        rank: int,
        world_size: int,
        backend: str | None = None,
        host: str | None = None,
        port: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Join the world. Collective: returns when every rank is there. Checks the sizes before it joins."""
        with share_start_up_errors(rank, world_size, host, port, timeout):
            if self._launched:
                raise ContextError(
                    "this context has already joined a world; call destroy() before you launch again, "
                    "or use another ParallelContext",
                    code="C013",
                )
            self._axes = world_axes(self.config, world_size)
            self._build = run_initializers(self.config, world_size, rank)
        self._owns_world = join_world(rank, world_size, backend, host, port, timeout)
        self._rank, self.world_size, self._launched = rank, world_size, True
        self.waits.open(rank, world_size, _logging.get_dist_logger().warning)
        own = DEFAULT_TIMEOUT if self._owns_world else None  # else what torch gives a group
        self._timeout = timedelta(seconds=timeout) if timeout else own

    def init_parallel_groups(self, seed: int | None = None) -> None:
        """Create the process groups of every mode, where all ranks have the same config. Collective over the world.

        `seed` is what `set_seed` will be given, which must be the same on all ranks too.
        """
        # All ranks have joined, and nobody has anything long to do: who does not come now is lost.
        with waiting_at_most(START_UP_TIMEOUT), self.waits.during("in launch()"):
            self._create_groups(seed)

    def _create_groups(self, seed: int | None) -> None:
        self._groups = groups = ProcessGroups(self._rank, self._timeout)
        self._layout = self._layout_of_groups()
        agree_on_layout(self._layout, self.device, self._settings(seed))
        adopted = False
        for hook in launch_hooks:
            adopted |= hook.adopt_groups(self._build, groups)
        self._build.refuse_waiting()
        if adopted:
            self._layout = self._layout_of_groups()
            agree_on_layout(self._layout, self.device)
        # Where all ranks create alike, and in a world of our own, no rank need wait for groups that it is not in.
        alone = self._owns_world and self._layout.is_regular and not adopted and dist.get_backend() != "mpi"
        for ranks in self._layout.rank_sets(self._rank if alone else None):
            groups.add(ranks, alone)
        if not is_same_everywhere(len(groups) if alone else 0, self.device):  # and so all ranks have come this far
            raise ContextError(
                f"the ranks created different numbers of groups; this rank (number {self._rank}): {len(groups)}"
            )
        for hook in launch_hooks:
            hook.after_groups(self, groups)

    def simulate(
        self,
        config: Config | dict[str, Any] | str | Path,
        world_size: int,
        rank: int,
        groups: ProcessGroups | None = None,
    ) -> None:
        """Be one rank of a world that is not there: it has all sizes, ranks and streams, and no process group.

        Models can be built in it, and plans made; nothing can communicate, but where `groups` are given that do as if.
        Ends with `destroy()`, as a real one does.
        """
        if self._launched:
            raise ContextError("this context has joined a world; simulate another with a ParallelContext of its own")
        self.load_config(config)
        self._layout = build_layout(self.config, world_size)
        self._rank, self.world_size, self._launched = rank, world_size, True
        self._groups = groups if groups is not None else NoGroups()
        self.is_simulated = True
        self.set_seed(int(self.config.get("seed") or 0))

    def destroy(self) -> None:
        """Leave the world and forget everything. Safe to call twice."""
        self.waits.close()
        if self._groups is not None:
            self._groups.destroy()
        if self._owns_world:
            leave_world()
        _logging.detach()
        self._reset()

    def __enter__(self) -> ParallelContext:
        return self

    def __exit__(self, *exc: object) -> None:
        self.destroy()

    # -- who am I -----------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """The rank lists of the whole world."""
        return self._layout

    @property
    def is_launched(self) -> bool:
        """Whether this context has joined a world."""
        return self._launched

    @property
    def data_parallel_size(self) -> int:
        return self._axis_size("data")

    @property
    def pipeline_parallel_size(self) -> int:
        return self._axis_size("pipeline")

    @property
    def tensor_parallel_size(self) -> int:
        return self._axis_size("tensor")

    def get_global_rank(self) -> int:
        """This process's rank in the world."""
        return self._rank

    def get_local_rank(self, mode: ParallelMode) -> int:
        """This process's position in its group of `mode`."""
        return self._layout.local_rank(mode_of(mode), self._rank)

    def get_world_size(self, mode: ParallelMode) -> int:
        """How many ranks this process's group of `mode` has."""
        return len(self.get_ranks_in_group(mode))

    def get_ranks_in_group(self, mode: ParallelMode) -> list[int]:
        """The global ranks of this process's group of `mode`, ascending."""
        return list(self._layout.group_of(mode_of(mode), self._rank))

    def get_group(self, mode: ParallelMode) -> dist.ProcessGroup:
        """The torch process group of `mode` that this rank is in."""
        ranks = self.get_ranks_in_group(mode)
        # A layer that asks for its group when it is built does not use it yet.
        return self._groups.group(ranks) if isinstance(self._groups, NoGroups) else self._joined().group(ranks)

    def get_second_group(self, mode: ParallelMode, backend: str) -> dist.ProcessGroup:
        """Another group of the ranks of `get_group(mode)`, with backends of its own ("cpu:gloo,cuda:nccl").

        The same one at every call; the first call is collective over the world.
        """
        return self._joined().second_group(self.get_ranks_in_group(mode), self._layout.groups(mode), backend)

    def group_of_ranks(self, ranks: Iterable[int]) -> dist.ProcessGroup:
        """The torch process group of exactly these ranks, whatever mode it was made for."""
        return self._joined().group(sorted(ranks))

    def ensure_groups(self, rank_sets: Iterable[tuple[int, ...]]) -> None:
        """Create groups for the rank sets that any rank asks for. Collective over the world, once at start-up."""
        if self.is_simulated:
            self._joined()  # an error where it has none
            return  # each is made when it is asked for
        asked = sorted({tuple(sorted(ranks)) for ranks in rank_sets})
        new = [ranks for ranks in asked if ranks not in self._joined() and not self._layout.is_group(ranks)]
        if is_same_everywhere(len(new), self.device) and not new:
            return  # as a rule: the groups of the modes are there, and no rank need tell what it asks for
        for ranks in sorted({tuple(ranks) for sets in gather_json(new, self.device) for ranks in sets}):
            self._joined().add(ranks, alone=False)

    def get_next_global_rank(self, mode: ParallelMode) -> int:
        """The next rank on the ring of this group; the last one's next is the first."""
        return self._ring(mode, +1)

    def get_prev_global_rank(self, mode: ParallelMode) -> int:
        """The previous rank on the ring of this group; the first one's previous is the last."""
        return self._ring(mode, -1)

    def is_first_rank(self, mode: ParallelMode) -> bool:
        return self.get_local_rank(mode) == 0

    def is_last_rank(self, mode: ParallelMode) -> bool:
        return self.get_local_rank(mode) == self.get_world_size(mode) - 1

    def is_pipeline_first_stage(self, ignore_virtual: bool = False) -> bool:
        """Whether this rank (and, with virtual stages, the chunk in use) is the first stage."""
        chunk_is_first = self.virtual_pipeline_parallel_size is None or self.virtual_pipeline_parallel_rank == 0
        return (ignore_virtual or chunk_is_first) and self.is_first_rank(ParallelMode.PIPELINE)

    def is_pipeline_last_stage(self, ignore_virtual: bool = False) -> bool:
        """Whether this rank (and, with virtual stages, the chunk in use) is the last stage."""
        size = self.virtual_pipeline_parallel_size
        chunk_is_last = size is None or self.virtual_pipeline_parallel_rank == size - 1
        return (ignore_virtual or chunk_is_last) and self.is_last_rank(ParallelMode.PIPELINE)

    def is_initialized(self, mode: ParallelMode) -> bool:
        """Whether this rank is in a group of `mode`."""
        return self._launched and self._layout.has(mode_of(mode), self._rank)

    def device_mesh(self, *modes: ParallelMode) -> DeviceMesh:
        """These modes as a torch DeviceMesh (outermost first) on the groups that already exist."""
        wanted = [mode_of(mode) for mode in modes]
        groups = [self.get_group(mode) for mode in wanted]
        return mesh_of(self._layout, wanted, groups, self._rank, self.device.type)

    # -- settings -----------------------------------------------------------------------------------------

    def set_device(self, ordinal: int | None = None) -> None:
        """Choose this process's device: CUDA device `ordinal` (default: the rank), modulo devices, else the CPU."""
        self.device = device_for(self._rank, ordinal)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def set_seed(self, seed: int) -> None:
        """Seed torch, Python, numpy if it is there, and the stream of each axis; may be called again.

        All of them as torch: alike on ranks that see the same data, others where data or stage differ.
        """
        self.seed = seed
        here = self._layout.coordinates(self._rank)
        apart = [f"{axis.name}={here[axis.name]}" for axis in self._layout.axes if axis.seeded_apart]
        own = derive_seed(seed, *apart)
        torch.manual_seed(own)
        random.seed(own)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(own % 2**32)
        self.streams.clear()
        for axis in self._layout.axes:
            parts = sorted({*apart, f"{axis.name}={here[axis.name]}"})
            self.streams.add(axis.mode, derive_seed(seed, axis.mode.value, *parts))

    def set_virtual_pipeline_parallel_size(self, size: int | None) -> None:
        self.virtual_pipeline_parallel_size = size

    def set_virtual_pipeline_parallel_rank(self, rank: int | None) -> None:
        self.virtual_pipeline_parallel_rank = rank

    def __deepcopy__(self, memo: object) -> ParallelContext:
        """A copy of a layer lives in the same world."""
        return self

    def __repr__(self) -> str:
        if not self._launched:
            return "ParallelContext(not launched: a world of one)"
        axes = " x ".join(f"{axis.name} {axis.size}" for axis in self._layout.axes if axis.size > 1)
        return f"ParallelContext(rank {self._rank} of {self.world_size}: {axes or 'one rank'})"

    # -- inside -------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self.config = load_config({})
        self.device = torch.device("cpu")
        self.streams = RandomStreams()
        self.waits = WaitWatch()
        self.seed = 0
        self.world_size = 1
        self.virtual_pipeline_parallel_size = None
        self.virtual_pipeline_parallel_rank = None
        self._rank = 0
        self._launched = self.is_simulated = False
        self._owns_world = False
        self._groups = None
        self._timeout = None
        self._layout = build_layout(self.config, 1)

    def _layout_of_groups(self) -> Layout:
        return layout_of(self._axes, self._build.groups, parallel_sizes(self.config).tensor_mode)

    def _settings(self, seed: int | None) -> dict[str, str]:
        """The settings that all ranks must have launched with, by key of the config."""
        waiting = {f"parallel, {each.source}": "creates its groups itself" for each in self._build.waiting}
        hooks = {"launch hooks": ", ".join(type(hook).__name__ for hook in launch_hooks)} if launch_hooks else {}
        seeds = {"seed": str(seed)} if seed is not None else {}
        return compared_texts(self.config) | seeds | waiting | hooks

    def _joined(self) -> ProcessGroups:
        if isinstance(self._groups, NoGroups):
            raise ContextError(
                "there are no processes here: this world is only simulated, so its ranks cannot communicate"
            )
        if self._groups is None:
            raise ContextError(
                "there are no process groups before launch; call colonnade.launch(config) first", code="C013"
            )
        return self._groups

    def _axis_size(self, name: str) -> int:
        return self._layout.grid.sizes[name]

    def _ring(self, mode: ParallelMode, step: int) -> int:
        ranks = self.get_ranks_in_group(mode)
        return ranks[(self.get_local_rank(mode) + step) % len(ranks)]
