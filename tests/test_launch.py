"""Launch: whoever started the processes, and everything that can be wrong with it."""

from __future__ import annotations

import logging
import os
import socket
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from colonnade import _launch
from colonnade._launch import (
    SLURM,
    WorldAddress,
    _rank_in,
    check_torch,
    detect,
    get_default_parser,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
    override,
    read,
)
from colonnade.context import rendezvous
from colonnade.context.parallel_context import LaunchHook, ParallelContext, launch_hooks
from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import global_context
from colonnade.errors import ConfigError, LaunchError, LayoutError
from colonnade.testing import run_world
from tests.ranks import on_ranks


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_with_no_launcher_it_is_a_world_of_one():
    with launch({"BATCH_SIZE": 4}, context=ParallelContext(), verbose=False) as gpc:
        assert gpc.world_size == 1
        assert gpc.config.BATCH_SIZE == 4
        value = torch.ones(2)
        dist.all_reduce(value, group=gpc.get_group(ParallelMode.DATA))
        assert value.tolist() == [1, 1]


def test_the_config_is_frozen_after_launch():
    with launch({"LR": 1}, context=ParallelContext(), verbose=False) as gpc, pytest.raises(ConfigError, match="frozen"):
        gpc.config.LR = 2


def test_the_global_context_is_the_one_that_is_filled_where_none_is_given():
    with launch({}, verbose=False) as gpc:
        assert gpc is global_context
        assert gpc.is_launched
        assert logging.getLogger("colonnade").handlers  # records go to stderr now


class Strict(ParallelContext):
    """Notes the device that it is given, and takes no seed."""

    ordinals: tuple[int | None, ...] = ()

    def set_device(self, ordinal: int | None = None) -> None:
        self.ordinals += (ordinal,)
        super().set_device(ordinal)

    def set_seed(self, seed: int) -> None:
        raise ValueError("no seed")


def test_a_launch_that_fails_after_it_has_joined_leaves_nothing_behind():
    context = Strict()
    with pytest.raises(ValueError, match="no seed"):
        launch({}, 0, 1, local_rank=3, context=context, verbose=False)
    assert context.ordinals == (3,)
    assert not context.is_launched
    assert not dist.is_initialized()


def test_a_launch_with_a_torch_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(_launch, "LEAST_TORCH", (99, 0))
    with pytest.raises(LaunchError, match=r"needs torch 99\.0 or newer"):
        launch({}, context=ParallelContext(), verbose=False)


def test_a_script_in_the_place_of_a_config_does_not_start(tmp_path):
    (tmp_path / "train.py").write_text("from colonnade import launch\nlaunch({})\n")
    with pytest.raises(ConfigError, match=r"train\.py calls launch\(\), so it is a script and not a config"):
        launch(tmp_path / "train.py", context=ParallelContext(), verbose=False)


def test_the_log_counts_ranks_in_a_mode_that_is_there_else_in_the_world():
    context = SimpleNamespace(
        is_initialized=lambda mode: mode == ParallelMode.TENSOR, get_global_rank=lambda: 5, get_local_rank=lambda _: 1
    )
    rank_of = partial(_rank_in, context)
    assert [rank_of(mode) for mode in (None, ParallelMode.TENSOR, ParallelMode.DATA)] == [5, 1, 5]


def test_the_seed_comes_from_the_argument_then_the_config_then_the_default():
    drawn = []
    for config, seed in (({"seed": 5}, None), ({}, 5), ({"seed": 9}, 5), ({}, None), ({"seed": None}, None)):
        with launch(config, seed=seed, context=ParallelContext(), verbose=False):
            drawn.append(torch.rand(()).item())
    assert drawn[0] == drawn[1] == drawn[2] != drawn[3] == drawn[4]


def _by(name: str, port: int) -> tuple[int, int, int]:
    import os

    rank, size = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    os.environ.pop("LOCAL_RANK")
    context = ParallelContext()
    if name == "arguments":
        found = launch({}, int(rank), int(size), "127.0.0.1", port, context=context, verbose=False)
    elif name == "slurm":
        os.environ |= {"SLURM_PROCID": rank, "SLURM_NPROCS": size}
        found = launch_from_slurm({}, host="127.0.0.1", port=port, context=context, verbose=False)
    elif name == "openmpi":
        os.environ |= {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": size, "OMPI_COMM_WORLD_LOCAL_RANK": rank}
        found = launch_from_openmpi({}, host="127.0.0.1", port=port, context=context, verbose=False)
    else:
        os.environ |= {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        start = launch_from_torch if name == "torch" else launch
        found = start({}, context=context, verbose=False)
    assert found is context
    with context:
        value = torch.tensor([1 + context.get_global_rank()])
        dist.all_reduce(value)
        dist.barrier()
        return context.get_global_rank(), context.world_size, value.item()


@pytest.mark.parametrize("name", ["arguments", "environment", "torch", "slurm", "openmpi"])
def test_every_way_to_launch(name):
    assert run_world(3, _by, name, free_port(), backend=None).values == [(0, 3, 6), (1, 3, 6), (2, 3, 6)]


def _adopt() -> tuple[int, int]:
    import os

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        seen = gpc.get_global_rank(), gpc.world_size
    assert dist.is_initialized()  # it was not ours to destroy
    return seen


def test_a_world_that_is_already_up_is_taken_and_left_as_it_was():
    assert run_world(2, _adopt).values == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"gradient_clipping": 1.0}, "clip_grad_norm"),
        ({"parallel": {"pipeline": 3}}, "does not divide world_size=4"),
        ({"parallel": {"tensor": {"size": 2, "mode": "2d"}}}, "square"),
        ({"parallel": {"tensor": -2}}, "parallel.tensor"),
    ],
)
@on_ranks(4, backend=None)
def test_a_bad_config_is_refused_on_every_rank_before_they_join(config: dict, part):
    with pytest.raises((ConfigError, LayoutError)) as error:
        launch(config, context=ParallelContext(), verbose=False)
    assert not dist.is_initialized()
    message = str(error.value)
    assert part in message


DIFFERING = [
    ({"clip_grad_norm": 1.0}, {"clip_grad_norm": 2.0}, "'clip_grad_norm': 1.0 on rank 0, 2.0 on rank 1"),
    ({"clip_grad_norm": 1.0}, {"clip_grad_norm": None}, "'clip_grad_norm': 1.0 on rank 0, nothing on rank 1"),
    (
        {"clip_grad_norm": {"max_norm": 1.0, "norm_type": 2}},
        {"clip_grad_norm": {"max_norm": 1.0, "norm_type": "inf"}},
        "'clip_grad_norm.norm_type': 2 on rank 0, 'inf' on rank 1",
    ),
    ({"fp16": True}, {"bf16": True}, "'fp16': True on rank 0, nothing on rank 1"),
    ({}, {"gradient_accumulation": 2}, "'gradient_accumulation': nothing on rank 0, 2 on rank 1"),
    ({"zero": 1}, {"zero": {"stage": 2}}, "'zero.stage': nothing on rank 0, 2 on rank 1"),
    ({}, {"sync": {"shared_memory": False}}, "'sync.shared_memory': nothing on rank 0, False on rank 1"),
    ({"parallel": {"tensor": 2}}, {}, "'parallel.tensor': 2 on rank 0, nothing on rank 1"),
    ({"seed": 1}, {"seed": 2}, "'seed': 1 on rank 0, 2 on rank 1"),
    ({"model": {"num_chunks": 1}}, {"model": {"num_chunks": 2}}, "'model.num_chunks': 1 on rank 0, 2 on rank 1"),
]


def _differ() -> list[str]:
    rank, told = dist.get_rank(), []
    for case in DIFFERING:
        with pytest.raises(ConfigError) as error:
            launch(case[rank], context=ParallelContext(), verbose=False)
        told.append(str(error.value))
    rendezvous.__version__ = f"0.{rank}"
    with pytest.raises(LaunchError) as wrong:
        launch({}, context=ParallelContext(), verbose=False)
    rendezvous.__version__ = "0.1"
    with pytest.raises(ConfigError, match="'seed': 0 on rank 0, 1 on rank 1"):
        launch({}, seed=rank, context=ParallelContext(), verbose=False)
    launch_hooks.extend([LaunchHook()] * rank)
    with pytest.raises(ConfigError, match="'launch hooks': nothing on rank 0, LaunchHook on rank 1"):
        launch({}, context=ParallelContext(), verbose=False)
    launch_hooks.clear()
    with pytest.raises(ConfigError, match="clip_grad_norm") as refused:
        launch({"gradient_clipping": 1.0} if rank else {}, context=ParallelContext(), verbose=False)
    assert ("on rank 1 (this rank is 0): " in str(refused.value)) == (rank == 0)
    # What is not ours may differ, and so may what is logged.
    launch(
        {"DATA": f"/disk{rank}", "log": ["info", "debug"][rank], "model": {"cache": rank}},
        context=ParallelContext(),
        verbose=False,
    ).destroy()
    return [*told, str(wrong.value)]


def test_configs_and_versions_that_differ_are_named_on_every_rank():
    one, other = run_world(2, _differ).values
    assert one == other
    for message, (*_, part) in zip(one, [*DIFFERING, ("'colonnade': 0.0 on rank 0, 0.1 on rank 1",)], strict=True):
        assert part in message
        assert "the same" in message


def _try_again(port: int, refused: int, at_once: bool) -> list[float]:
    """The config of one rank is refused. All are told at once, and may try again at once, or later."""
    rank, context = int(os.environ["RANK"]), ParallelContext()
    address = {"rank": rank, "world_size": 2, "host": "127.0.0.1", "port": port}
    begin = time.monotonic()
    with pytest.raises(ConfigError, match="clip_grad_norm") as error:
        launch({"gradient_clipping": 1.0} if rank == refused else {}, **address, context=context, verbose=False)
    assert time.monotonic() - begin < 20
    assert (f"on rank {refused} (this rank is {rank}): " in str(error.value)) == (rank != refused)
    if rank == 1 and not at_once:
        time.sleep(1.5)
    sums = []
    for _ in range(2):
        with launch({}, **address, context=context, verbose=False, timeout=20):
            value = torch.tensor([float(rank)])
            dist.all_reduce(value)
            sums.append(value.item())
    return sums


@pytest.mark.slow
@pytest.mark.parametrize("refused", [0, 1])
def test_a_config_that_is_refused_on_one_rank_is_told_to_all_who_may_try_again(refused):
    for at_once in (True, False):
        found = run_world(2, _try_again, free_port(), refused, at_once, backend=None).values
        assert found == [[1.0, 1.0], [1.0, 1.0]]


def _misses_one(port: int) -> None:
    with pytest.raises(LaunchError, match=r"rank 0 of 2 could not join .*: 1 of 2 ranks connected within 1 s"):
        launch({}, 0, 2, "127.0.0.1", port, context=ParallelContext(), timeout=1, verbose=False)
    with pytest.raises(ConfigError, match="clip_grad_norm"):  # nobody is there to be told
        launch({"gradient_clipping": 1.0}, 1, 2, "127.0.0.1", port, context=ParallelContext(), timeout=1)


@pytest.mark.slow
def test_a_rank_that_never_comes_is_not_waited_for_longer_than_asked():
    _misses_one(free_port())


@pytest.mark.slow
def test_a_port_in_use_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} on 127.0.0.1 is in use"):
            launch({}, 0, 2, "127.0.0.1", port, context=ParallelContext(), timeout=5)
        # The other ranks reach a stranger; torch alone would wait for ever.
        with pytest.raises(LaunchError, match="a process listens there but did not answer"):
            launch({}, 1, 2, "127.0.0.1", port, context=ParallelContext(), timeout=1)


@pytest.mark.slow
def test_nobody_at_the_address_is_said():
    with pytest.raises(LaunchError, match="rank 1 could not reach rank 0"):
        launch({}, 1, 2, "127.0.0.1", free_port(), context=ParallelContext(), timeout=1)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"rank": 2, "world_size": 2, "host": "h", "port": 1}, "rank 2 does not exist in a world of 2 ranks"),
        ({"rank": 0, "world_size": 0, "host": "h", "port": 1}, "rank 0 does not exist in a world of 0 ranks"),
        ({"rank": -1, "world_size": 2, "host": "h", "port": 1}, "rank -1 does not exist in a world of 2 ranks"),
        ({"rank": 0}, "pass both, or leave both out"),
        ({"rank": 0, "world_size": 2, "host": "h", "port": 99999}, "port must be a number"),
        ({"rank": 0, "world_size": 2}, "needs the address of rank 0"),
        ({"rank": "0", "world_size": 2}, "rank must be an integer"),
    ],
)
def test_impossible_arguments(arguments, part):
    with pytest.raises(LaunchError, match=part):
        launch({}, **arguments, context=ParallelContext())


def test_missing_or_senseless_variables_are_named():
    with pytest.raises(LaunchError, match="SLURM_PROCID is not set"):
        read(SLURM, {})
    with pytest.raises(LaunchError, match="WORLD_SIZE is 'two'"):
        detect({"RANK": "0", "WORLD_SIZE": "two"})
    with pytest.raises(LaunchError, match="MASTER_PORT is 'x'"):
        detect({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "x"})
    assert detect({}) == WorldAddress()
    assert override(WorldAddress(), rank=1, world_size=2).rank == 1


def test_a_torch_that_is_too_old_is_refused():
    with pytest.raises(LaunchError, match=r"torch 2\.10\.1\+cpu is too old"):
        check_torch("2.10.1+cpu")
    check_torch("2.11.0")
    check_torch("3.0.0a1")


def test_the_default_parser_takes_both_spellings_of_local_rank():
    parser = get_default_parser()
    assert parser.parse_args(["--local-rank=3"]).local_rank == 3
    names = {"config": "x.py", "host": "h", "port": 5, "world_size": 4, "rank": 3, "local_rank": 2, "backend": "gloo"}
    given = [word for name, value in names.items() for word in (f"--{name}", str(value))]
    assert vars(parser.parse_args(given)) == names
    assert vars(parser.parse_args([])) == dict.fromkeys(names)


def test_a_variable_that_is_left_over_is_named_beside_the_one_that_is_missing():
    with pytest.raises(
        LaunchError, match=r"RANK is not set.* or unset WORLD_SIZE, which is left over, for a single process"
    ):
        detect({"WORLD_SIZE": "2"})
