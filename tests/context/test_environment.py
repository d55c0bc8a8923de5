"""Where rank, world size and address come from, and what is refused."""

from __future__ import annotations

import pytest

from colonnade._launch import OPENMPI, SLURM, TORCH, WorldAddress, detect, override, read
from colonnade.errors import LaunchError

TWO = {"RANK": "1", "WORLD_SIZE": "2"}


def test_with_no_launcher_this_process_is_a_world_of_one():
    address = detect({})
    assert (address.rank, address.world_size, address.local_rank, address.host, address.port) == (
        0,
        1,
        None,
        None,
        None,
    )


def test_the_environment_is_that_of_the_process_unless_it_is_given(monkeypatch):
    for name, value in TWO.items():
        monkeypatch.setenv(name, value)
    assert (detect().rank, read(TORCH).rank) == (1, 1)
    assert detect({"RANK": "3", "WORLD_SIZE": "4"}).rank == 3


@pytest.mark.parametrize(
    ("more", "arguments", "expected"),
    [
        ({}, {}, (None, None, None)),
        ({"LOCAL_RANK": "3"}, {}, (3, None, None)),
        ({"LOCAL_RANK": "x"}, {}, (None, None, None)),
        ({"MASTER_ADDR": "there", "MASTER_PORT": "1"}, {}, (None, "there", 1)),
        ({"MASTER_ADDR": "there", "MASTER_PORT": "65535"}, {"host": "here"}, (None, "here", 65535)),
        ({"MASTER_ADDR": "there", "MASTER_PORT": "7"}, {"port": 8}, (None, "there", 8)),
        ({"MASTER_PORT": ""}, {"host": "here"}, (None, "here", None)),
    ],
)
def test_local_rank_and_address(more, arguments, expected):
    address = read(TORCH, {**TWO, **more}, **arguments)
    assert (address.rank, address.world_size, address.source) == (1, 2, "torchrun")
    assert (address.local_rank, address.host, address.port) == expected


def test_every_launcher_has_variables_of_its_own():
    for launcher in (TORCH, SLURM, OPENMPI):
        names = (launcher.rank, launcher.world_size, launcher.local_rank)
        address = read(launcher, dict(zip(names, "243", strict=True)))
        assert (address.rank, address.world_size, address.local_rank) == (2, 4, 3)
    assert detect({"SLURM_PROCID": "1", "SLURM_NPROCS": "2"}) == WorldAddress()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set.* or unset RANK, which is left over"),
        ({"WORLD_SIZE": "2"}, "RANK is not set.* or unset WORLD_SIZE, which is left over"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is '-1'; it must be a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 does not exist in a world of 2 ranks.*from torchrun"),
        *(({**TWO, "MASTER_PORT": port}, f"MASTER_PORT is '{port}'") for port in ("0", "65536", "-1", "x")),
    ],
)
def test_variables_that_make_no_sense_are_named(environ, message):
    with pytest.raises(LaunchError, match=message):
        detect(environ)


def test_without_any_variable_of_its_launcher_a_process_is_told_to_launch_alone():
    with pytest.raises(LaunchError, match=r"or call launch\(config\) for a single process"):
        read(SLURM, {})


@pytest.mark.parametrize(
    ("size", "given", "expected"),
    [
        (1, {}, (0, 1)),
        (1, {"rank": 1, "world_size": 2}, (1, 2)),
        (1, {"rank": 0, "world_size": 1}, (0, 1)),
        (4, {"rank": 3}, (3, 4)),
        (4, {"world_size": 2}, (0, 2)),
        (2, {"rank": 1}, (1, 2)),
    ],
)
def test_arguments_come_before_what_was_detected(size, given, expected):
    there = WorldAddress(world_size=size, host="there", port=7)
    address = override(there, **given)
    assert (address.rank, address.world_size, address.host, address.port) == (*expected, "there", 7)
    changed = override(there, **given, host="here", port=65535, local_rank=0)
    assert (changed.host, changed.port, changed.local_rank) == ("here", 65535, 0)
    assert override(there, port=1).port == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 0}, r"launch\(\) got rank=0 and world_size=None; pass both"),
        ({"world_size": 2}, r"launch\(\) got rank=None and world_size=2; pass both"),
        ({"rank": -1, "world_size": 2}, "rank -1 does not exist in a world of 2 ranks"),
        ({"rank": 2, "world_size": 2}, "rank 2 does not exist in a world of 2 ranks"),
        ({"rank": True, "world_size": 2}, "rank must be an integer, not True"),
        ({"rank": 0, "world_size": "2"}, "world_size must be an integer, not '2'"),
        ({"rank": 0, "world_size": 2.0}, "world_size must be an integer, not 2.0"),
        *(({"port": port}, "port must be a number from 1 to 65535, not") for port in (0, -1, 65536, "80", 80.0)),
    ],
)
def test_arguments_that_are_impossible(given, message):
    with pytest.raises(LaunchError, match=message):
        override(WorldAddress(), **given)
