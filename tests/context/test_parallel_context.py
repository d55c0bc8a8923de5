"""The context in real gloo worlds: every group sums to the right value; nothing is left behind."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist

from colonnade._launch import launch
from colonnade.comm.torch_versions import default_store, timeout_of
from colonnade.context.parallel_context import LaunchHook, ParallelContext, launch_hooks
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ContextError, LaunchError
from colonnade.logging import get_dist_logger
from colonnade.testing import run_world
from tests.ranks import on_ranks

LAYOUTS = [
    {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}},
    {"tensor": {"size": 4, "mode": "2d"}, "expert": 2},
    {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}},
    {"tensor": {"size": 8, "mode": "3d"}},
    {"pipeline": 2, "tensor": {"size": 2, "mode": "sequence"}},
    {"pipeline": 2, "sequence": 2, "expert": 2},
]


def _sum_over_every_group(parallel: dict) -> tuple[dict[str, tuple[float, list[int]]], list[list[int]]]:
    """The sum over each group of this rank; the groups that were created here."""
    created, original = [], dist.new_group
    dist.new_group = lambda ranks, *rest, **named: created.append(ranks) or original(ranks, *rest, **named)
    with launch({"parallel": parallel}, context=ParallelContext(), verbose=False) as context:
        dist.new_group = original
        sums = {}
        for mode in context.layout.modes:
            value = torch.tensor([float(10 ** context.get_global_rank())], dtype=torch.float64)
            dist.all_reduce(value, group=context.get_group(mode))
            sums[mode.name] = (value.item(), context.get_ranks_in_group(mode))
        return sums, created


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_every_group_of_eight_ranks_reduces_to_the_sum_of_its_ranks(parallel):
    values = run_world(8, _sum_over_every_group, parallel).values
    assert all(created == values[0][1] for _, created in values)  # in a world of another's, all create alike
    for rank, (sums, _) in enumerate(values):
        for mode, (total, ranks) in sums.items():
            assert rank in ranks
            assert total == sum(10.0**member for member in ranks), mode


def _sum_in_worlds_of_its_own() -> list[tuple[dict[str, tuple[float, list[int]]], list[list[int]]]]:
    return [_sum_over_every_group(parallel) for parallel in LAYOUTS]


def test_in_a_world_of_its_own_a_rank_creates_its_own_groups_alone():
    for rank, layouts in enumerate(run_world(8, _sum_in_worlds_of_its_own, backend=None).values):
        for sums, created in layouts:
            assert all(rank in ranks for ranks in created)
            for mode, (total, ranks) in sums.items():
                assert rank in ranks
                assert total == sum(10.0**member for member in ranks), mode


def _ask_beyond_the_modes() -> list[float]:
    """Only rank 5 asks for a group that is none of a mode; those of modes of other ranks are known everywhere."""
    with launch({"parallel": {"tensor": 2}}, context=ParallelContext(), verbose=False) as context:
        rank = context.get_global_rank()
        created = []
        original = dist.new_group
        dist.new_group = lambda ranks, *rest, **named: created.append(ranks) or original(ranks, *rest, **named)
        context.ensure_groups([(0, 1), (1, 3, 5, 7)])
        assert created == []
        context.ensure_groups([(1, 4, 5)] if rank == 5 else [])
        dist.new_group = original
        assert created == [[1, 4, 5]]
        value = torch.tensor([float(rank)])
        if rank in (1, 4, 5):
            dist.all_reduce(value, group=context.group_of_ranks([1, 4, 5]))
        return value.tolist()


def test_groups_beyond_the_modes_are_told_to_all_and_those_of_modes_to_none():
    values = run_world(8, _ask_beyond_the_modes, backend=None).values
    assert values == [[0.0], [10.0], [2.0], [3.0], [10.0], [10.0], [6.0], [7.0]]


@on_ranks(4, backend=None)
def test_relaunching_in_one_process_leaks_neither_groups_nor_sockets_nor_threads():
    seen = []
    for parallel in ({"tensor": 2}, {"pipeline": 4}, {"data": 4}, {"tensor": 4}):
        with launch({"parallel": parallel}, context=ParallelContext(), verbose=False) as context:
            value = torch.ones(1)
            for mode in context.layout.modes:
                dist.all_reduce(value, group=context.get_group(mode))
            dist.barrier()
        sockets = sum("socket" in _link(entry) for entry in os.listdir("/proc/self/fd"))
        threads = len(os.listdir("/proc/self/task"))
        groups = len(dist.distributed_c10d._world.pg_map)
        seen.append((groups, sockets, threads, threading.active_count()))
    first, last = seen[0], seen[-1]
    assert first[0] == last[0] == 0
    assert last[1] <= first[1]
    assert last[2] <= first[2] + 1


def _link(entry: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{entry}")
    except OSError:
        return ""


def _surface() -> dict[str, object]:
    ParallelContext().destroy()  # one that has joined nothing leaves nothing
    with launch({"parallel": {"pipeline": 2, "tensor": 2}}, context=ParallelContext(), verbose=False) as gpc:
        data, pipe = ParallelMode.DATA, ParallelMode.PIPELINE
        assert gpc._timeout is None  # the world is another's: what torch gives a group
        return {
            "watched": "colonnade waits" in [thread.name for thread in threading.enumerate()],
            "sizes": (gpc.data_parallel_size, gpc.pipeline_parallel_size, gpc.tensor_parallel_size),
            "world": (gpc.world_size, gpc.get_world_size(ParallelMode.GLOBAL)),
            "local": gpc.get_local_rank(pipe),
            "ring": (gpc.get_prev_global_rank(pipe), gpc.get_next_global_rank(pipe)),
            "ends": (gpc.is_first_rank(pipe), gpc.is_last_rank(pipe)),
            "stages": (gpc.is_pipeline_first_stage(), gpc.is_pipeline_last_stage()),
            "initialized": (gpc.is_initialized(data), gpc.is_initialized(ParallelMode.PARALLEL_2D_ROW)),
            "one_communicator_per_rank_set": gpc.get_group(ParallelMode.TENSOR)
            is gpc.group_of_ranks(gpc.get_ranks_in_group(ParallelMode.TENSOR)),
            "communicators": len(gpc._joined()),
        }


def test_the_public_surface_on_four_ranks():
    seen = run_world(4, _surface).values[3]
    assert seen["watched"]
    assert seen["sizes"] == (1, 2, 2)
    assert seen["world"] == (4, 4)
    assert seen["local"] == 1
    assert seen["ring"] == (1, 1)
    assert seen["ends"] == seen["stages"] == (False, True)
    assert seen["initialized"] == (True, False)
    assert seen["one_communicator_per_rank_set"]
    # world (= MODEL), itself alone (= DATA), its pipeline pair, its tensor pair
    assert seen["communicators"] == 4


def _virtual_stages() -> list[tuple[bool, bool]]:
    with launch({"parallel": {"pipeline": 2}}, context=ParallelContext(), verbose=False) as gpc:
        gpc.set_virtual_pipeline_parallel_size(2)
        seen = []
        for chunk in range(2):
            gpc.set_virtual_pipeline_parallel_rank(chunk)
            seen.append((gpc.is_pipeline_first_stage(), gpc.is_pipeline_last_stage()))
        assert gpc.is_pipeline_first_stage(ignore_virtual=True) == gpc.is_first_rank(ParallelMode.PIPELINE)
        return seen


def test_virtual_stages_are_first_or_last_only_with_their_chunk():
    first, last = run_world(2, _virtual_stages).values
    assert first == [(True, False), (False, False)]
    assert last == [(False, False), (False, True)]


def _ask_for_a_group_that_is_not_there() -> tuple[str, str]:
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        with pytest.raises(ContextError) as missing_mode:
            gpc.get_group(ParallelMode.PARALLEL_2D_ROW)
        with pytest.raises(ContextError) as missing_set:
            gpc.group_of_ranks([5, 6])
        return str(missing_mode.value), str(missing_set.value)


def test_a_group_that_is_not_there_is_an_error_that_lists_what_is():
    mode, ranks = run_world(2, _ask_for_a_group_that_is_not_there).values[1]
    assert "PARALLEL_2D_ROW has no groups in this layout" in mode
    assert "GLOBAL, DATA" in mode
    assert "[5, 6]" in ranks


def test_a_hook_takes_on_nothing_unless_it_says_so():
    assert LaunchHook().adopt_groups(None, None) is False


def test_before_launch_it_is_a_world_of_one_without_groups():
    context = ParallelContext()
    assert context.verbose
    _is_a_world_of_one(context)
    assert context.get_world_size(ParallelMode.GLOBAL) == 1
    assert not context.is_initialized(ParallelMode.DATA)
    with pytest.raises(ContextError, match="launch"):
        context.get_group(ParallelMode.DATA)


def _is_a_world_of_one(context: ParallelContext) -> None:
    assert not context.is_launched
    assert not context.is_simulated
    assert (context.seed, context.world_size, context.get_global_rank(), context.device.type) == (0, 1, 0, "cpu")
    assert (context.data_parallel_size, context.pipeline_parallel_size, context.tensor_parallel_size) == (1, 1, 1)
    assert context.virtual_pipeline_parallel_size is context.virtual_pipeline_parallel_rank is None
    assert (context.layout.world_size, dict(context.config)) == (1, {})


def test_after_it_all_is_as_before():
    with launch({"seed": 3, "LR": 1}, context=ParallelContext(), verbose=False) as context:
        store = default_store()
        assert get_dist_logger()._logger.handlers
    _is_a_world_of_one(context)
    assert store.add("colonnade/left", 0) == 1  # it said that it goes
    assert not get_dist_logger()._logger.handlers
    context.destroy()


def test_a_rank_of_a_world_that_is_not_there_has_no_groups():
    context = ParallelContext()
    context.simulate({"parallel": {"tensor": 2}}, 8, 5)
    assert (context.seed, context.is_simulated, context.is_launched) == (0, True, True)
    assert context.get_group(ParallelMode.DATA) is None
    for ask in (lambda: context.ensure_groups([(0, 3)]), lambda: context.group_of_ranks([1, 3, 5, 7])):
        with pytest.raises(ContextError, match="this world is simulated"):
            ask()
    with pytest.raises(ContextError, match="has already joined a world"):
        context.simulate({}, 1, 0)
    context.destroy()
    _is_a_world_of_one(context)
    context.simulate({"seed": 7}, 1, 0)
    assert context.seed == 7
    context.destroy()


def test_launching_twice_says_to_destroy_first():
    with launch({}, context=ParallelContext(), verbose=False) as context, pytest.raises(ContextError, match="destroy"):
        launch({}, context=context)


def test_a_failed_launch_leaves_nothing_behind():
    context = ParallelContext()
    for address in ({}, {"host": "here"}, {"port": 7}):
        with pytest.raises(LaunchError, match="needs the address of rank 0"):
            launch({}, rank=0, world_size=2, context=context, **address)
    assert not dist.is_initialized()
    launch({}, context=context, verbose=False).destroy()
    assert not dist.is_initialized()


def _mesh() -> tuple[list[object], list[int], float]:
    with launch({"parallel": {"tensor": 2}}, context=ParallelContext(), verbose=False) as gpc:
        mesh = gpc.device_mesh(ParallelMode.DATA, ParallelMode.TENSOR)
        from torch.distributed.tensor import Shard, distribute_tensor

        whole = torch.arange(16.0).reshape(4, 4)
        piece = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        flat = gpc.device_mesh(ParallelMode.TENSOR)
        assert (mesh.mesh_dim_names, flat.mesh_dim_names) == (("data", "tensor"), ("tensor",))
        assert [mesh.get_group(name) for name in ("data", "tensor")] == [
            gpc.get_group(mode) for mode in (ParallelMode.DATA, ParallelMode.TENSOR)
        ]
        with pytest.raises(ContextError, match="needs at least one mode"):
            gpc.device_mesh()
        return mesh.mesh.tolist(), flat.mesh.tolist(), piece.full_tensor().sum().item()


def test_modes_make_a_device_mesh_that_dtensor_takes():
    mesh, tensor, total = run_world(4, _mesh).values[3]
    assert mesh == [[0, 1], [2, 3]]
    assert tensor == [2, 3]
    assert total == 120.0


def _no_grid() -> str:
    with launch({"parallel": {"tensor": 2}}, context=ParallelContext(), verbose=False) as gpc:
        with pytest.raises(ContextError) as error:
            gpc.device_mesh(ParallelMode.MODEL, ParallelMode.TENSOR)
        return str(error.value)


def test_modes_that_do_not_vary_independently_are_no_mesh():
    assert "do not form a grid" in run_world(4, _no_grid).values[0]


class _Limits(LaunchHook):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def after_groups(self, context, groups):
        self.seen.append(timeout_of().total_seconds())


def _limits() -> list[float]:
    hook = _Limits()
    launch_hooks.append(hook)
    for given in (None, 50.0):
        with launch({}, context=ParallelContext(), verbose=False, timeout=given) as context:
            hook.seen.append(timeout_of().total_seconds())
            assert context._timeout.total_seconds() == hook.seen[-1]
            assert dist.get_backend() == "gloo"
    return hook.seen


def test_the_agreements_of_a_launch_wait_for_minutes_and_the_run_for_as_long_as_it_is_told():
    (seen,) = run_world(1, _limits, backend=None).values
    assert seen == [120, 1800, 50, 50]
