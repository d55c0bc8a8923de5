"""ParallelContext: the state of one process in the world.

Process groups, ranks and sizes by mode; seeds and random streams; the device.
"""

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
# Modes as a torch DeviceMesh, for DTensor, FSDP2 and other users of meshes.
# --------------------------------------------------------------------------------------------------


def mesh_of(
    layout: Layout,
    modes: list[ParallelMode],
    groups: list[dist.ProcessGroup],
    rank: int,
    device_type: str,
) -> DeviceMesh:
    """Make a DeviceMesh whose dimensions are the existing `groups` of `modes`, outermost first, named by the values of the
    modes."""
    if not modes:
        raise ContextError("device_mesh() needs at least one mode, such as device_mesh(ParallelMode.DATA)", code="C012")
    names = tuple(mode.value for mode in modes)
    ranks = torch.tensor(_rank_grid(layout, modes, rank), device="cpu")
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)


def _rank_grid(layout: Layout, modes: list[ParallelMode], rank: int) -> Any:
    """Nested lists of the ranks reached from `rank` along every mode; raises if the modes do not form a grid."""
    # They do if walking from any of the reached ranks gives the same lists.
    grid = _walk(layout, modes, rank)
    flat = torch.tensor(grid, device="cpu").flatten().tolist()
    if len(set(flat)) != len(flat) or any(_walk(layout, modes, other) != grid for other in flat):
        raise ContextError(
            f"the modes {listed(mode.name for mode in modes)} do not form a grid. From rank {rank}, their groups "
            f"lead to the ranks {flat}. Use modes whose coordinates vary independently.",
            code="C012",
        )
    return grid


def _walk(layout: Layout, modes: list[ParallelMode], start: int) -> Any:
    if not modes:
        return start
    mode, *inner = modes
    return [_walk(layout, inner, rank) for rank in layout.group_of(mode, start)]


class LaunchHook:
    """Base class of callbacks that every launch of this process calls while an instance is in the list `launch_hooks`."""

    def adopt_groups(self, build: Build, groups: ProcessGroups) -> bool:
        """Run the initializers in `build.waiting`. Called after the world is joined; returns whether there were any."""
        return False

    def after_groups(self, context: ParallelContext, groups: ProcessGroups) -> None:
        """Called when the groups of every mode exist. Collective over the world."""


launch_hooks: list[LaunchHook] = []


class ParallelContext:
    """The world of this process: its ranks, process groups, sizes, device and random streams. Usable as a context manager.

    Before `launch` it is a world of one rank. After `destroy()` (or the end of the `with` block) it is a world of one rank again,
    without groups, sockets, random streams and config. The states of the random generators are kept.
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
    """Whether other processes are only simulated; values that depend on other ranks' data are then assumed to be balanced."""
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
        """Join the world. Collective over the world: returns when every rank has joined.

        Args:
            rank: The rank of this process.
            world_size: The number of ranks.
            backend: "nccl", "gloo" or another backend of torch.distributed; by default NCCL with CUDA, else gloo.
            host: The address of rank 0.
            port: A free port on the host of rank 0.
            timeout: Seconds after which a waiting rank raises.

        Raises:
            LayoutError: The sizes in the config do not fit the world size; raised on all ranks before they join.
        """
        with share_start_up_errors(rank, world_size, host, port, timeout):
            if self._launched:
                raise ContextError(
                    "this context has already joined a world. Call destroy() before you launch again, or use another "
                    "ParallelContext.",
                    code="C013",
                )
            self._axes = world_axes(self.config, world_size)
            self._build = run_initializers(self.config, world_size, rank)
        self._owns_world = join_world(rank, world_size, backend, host, port, timeout)
        self._rank, self.world_size, self._launched = rank, world_size, True
        self.waits.open(rank, world_size, _logging.get_dist_logger().warning)
        own = DEFAULT_TIMEOUT if self._owns_world else None  # None: torch's default for new groups
        self._timeout = timedelta(seconds=timeout) if timeout else own

    def init_parallel_groups(self, seed: int | None = None) -> None:
        """Create the process groups of every mode. Collective over the world.

        All ranks must have the same config. `seed`, with which `set_seed` is called later, is compared between ranks, too.
        """
        # All ranks have joined and have no long work to do, so a rank that does not arrive within minutes has failed.
        with waiting_at_most(START_UP_TIMEOUT), self.waits.during("in launch()"):
            self._groups = groups = ProcessGroups(self._rank, self._timeout)
            self._layout = self._layout_of_groups()
            waiting = {f"parallel, {entry.source}": "creates its groups itself" for entry in self._build.waiting}
            hooks = {"launch hooks": ", ".join(type(hook).__name__ for hook in launch_hooks)} if launch_hooks else {}
            seeds = {"seed": str(seed)} if seed is not None else {}
            agree_on_layout(self._layout, self.device, compared_texts(self.config) | seeds | waiting | hooks)

            # Initializers that create their groups themselves run in the joined world, and may complete the layout.
            adopted = False
            for hook in launch_hooks:
                adopted |= hook.adopt_groups(self._build, groups)
            self._build.refuse_waiting()
            if adopted:
                self._layout = self._layout_of_groups()
                agree_on_layout(self._layout, self.device)

            # If every rank creates the same number of groups, and nobody else has created any, torch's local synchronization
            # works, and no rank waits for groups that it is not in.
            alone = self._owns_world and self._layout.is_regular and not adopted and dist.get_backend() != "mpi"
            for ranks in self._layout.rank_sets(self._rank if alone else None):
                groups.add(ranks, alone)
            # The comparison is also a barrier: after it all ranks have their groups.
            if not is_same_everywhere(len(groups) if alone else 0, self.device):
                raise ContextError(
                    f"ranks created different numbers of process groups: rank {self._rank} created {len(groups)}. "
                    "Return the same groups on every rank from your initializers."
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
        """Become one rank of a simulated world, with all sizes, ranks and random streams but no other processes.

        Models can be built and jobs estimated in it. Communication raises, unless `groups` simulate that, too. `destroy()` ends
        the simulation.

        Args:
            config: The config of the simulated job.
            world_size: The number of simulated ranks.
            rank: The rank of this process among them.
            groups: Process groups that simulate communication.
        """
        if self._launched:
            raise ContextError(
                "this context has already joined a world. Use a new ParallelContext to simulate another world."
            )
        self.load_config(config)
        self._layout = build_layout(self.config, world_size)
        self._rank, self.world_size, self._launched = rank, world_size, True
        self._groups = groups if groups is not None else NoGroups()
        self.is_simulated = True
        self.set_seed(int(self.config.get("seed") or 0))

    def destroy(self) -> None:
        """Leave the world and reset this context. Safe to call twice."""
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
        """The layout: the groups of every mode, for all ranks of the world."""
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
        """The number of ranks in this process's group of `mode`."""
        return len(self.get_ranks_in_group(mode))

    def get_ranks_in_group(self, mode: ParallelMode) -> list[int]:
        """The global ranks of this process's group of `mode`, ascending."""
        return list(self._layout.group_of(mode_of(mode), self._rank))

    def get_group(self, mode: ParallelMode) -> dist.ProcessGroup:
        """The torch process group of `mode` that this rank is in."""
        ranks = self.get_ranks_in_group(mode)
        # In a simulated world a layer may get its group when it is built; only using the group raises.
        return self._groups.group(ranks) if isinstance(self._groups, NoGroups) else self._joined().group(ranks)

    def get_second_group(self, mode: ParallelMode, backend: str) -> dist.ProcessGroup:
        """A second process group of the ranks of `get_group(mode)`, with the given backend ("cpu:gloo,cuda:nccl").

        The group is cached. The first call for a mode and backend is collective over the world.
        """
        return self._joined().second_group(self.get_ranks_in_group(mode), self._layout.groups(mode), backend)

    def group_of_ranks(self, ranks: Iterable[int]) -> dist.ProcessGroup:
        """The torch process group of exactly these ranks. The mode does not matter."""
        return self._joined().group(sorted(ranks))

    def ensure_groups(self, rank_sets: Iterable[tuple[int, ...]]) -> None:
        """Create process groups for the given rank sets of all ranks. Collective over the world, once at start-up."""
        if self.is_simulated:
            self._joined()  # raises without simulated groups, which are made on request
            return
        needed = sorted({tuple(sorted(ranks)) for ranks in rank_sets})
        new = [ranks for ranks in needed if ranks not in self._joined() and not self._layout.is_group(ranks)]
        # Usually the groups of the modes suffice, and one small all-reduce shows that no rank needs another.
        if is_same_everywhere(len(new), self.device) and not new:
            return
        for ranks in sorted({tuple(ranks) for sets in gather_json(new, self.device) for ranks in sets}):
            self._joined().add(ranks, alone=False)

    def get_next_global_rank(self, mode: ParallelMode) -> int:
        """The global rank after this rank in its group of `mode`; the first rank follows the last."""
        return self._ring(mode, +1)

    def get_prev_global_rank(self, mode: ParallelMode) -> int:
        """The global rank before this rank in its group of `mode`; the last rank precedes the first."""
        return self._ring(mode, -1)

    def is_first_rank(self, mode: ParallelMode) -> bool:
        return self.get_local_rank(mode) == 0

    def is_last_rank(self, mode: ParallelMode) -> bool:
        return self.get_local_rank(mode) == self.get_world_size(mode) - 1

    def is_pipeline_first_stage(self, ignore_virtual: bool = False) -> bool:
        """Whether this rank (with virtual stages, the current model chunk) is the first pipeline stage."""
        chunk_is_first = self.virtual_pipeline_parallel_size is None or self.virtual_pipeline_parallel_rank == 0
        return (ignore_virtual or chunk_is_first) and self.is_first_rank(ParallelMode.PIPELINE)

    def is_pipeline_last_stage(self, ignore_virtual: bool = False) -> bool:
        """Whether this rank (with virtual stages, the current model chunk) is the last pipeline stage."""
        size = self.virtual_pipeline_parallel_size
        chunk_is_last = size is None or self.virtual_pipeline_parallel_rank == size - 1
        return (ignore_virtual or chunk_is_last) and self.is_last_rank(ParallelMode.PIPELINE)

    def is_initialized(self, mode: ParallelMode) -> bool:
        """Whether this rank is in a group of `mode`."""
        return self._launched and self._layout.has(mode_of(mode), self._rank)

    def device_mesh(self, *modes: ParallelMode) -> DeviceMesh:
        """A torch DeviceMesh with these modes as dimensions, outermost first. It uses the existing process groups."""
        wanted = [mode_of(mode) for mode in modes]
        groups = [self.get_group(mode) for mode in wanted]
        return mesh_of(self._layout, wanted, groups, self._rank, self.device.type)

    # -- settings -----------------------------------------------------------------------------------------

    def set_device(self, ordinal: int | None = None) -> None:
        """Set the device: CUDA device `ordinal` (default: the rank) modulo the number of devices; the CPU without CUDA."""
        self.device = device_for(self._rank, ordinal)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def set_seed(self, seed: int) -> None:
        """Seed torch, Python, numpy (if imported), and the random stream of each axis. May be called again.

        Seeds are equal on ranks that see the same data, and different for distinct data or another pipeline stage.
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
        """Return this context itself, so that a copied layer keeps its process groups."""
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

    def _joined(self) -> ProcessGroups:
        """The process groups; raises if there are none."""
        if isinstance(self._groups, NoGroups):
            raise ContextError(
                "this world is simulated, so its ranks cannot communicate. Launch a real world to communicate."
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
