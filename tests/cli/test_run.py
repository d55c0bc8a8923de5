"""The command line of `run`: where our options end and the script's arguments begin."""

from __future__ import annotations

import pytest

from colonnade.cli.run import split

OPTIONS = {"--nproc": True, "-n": True, "--module": False, "-m": False, "--help": False}


@pytest.mark.parametrize(
    ("line", "ours", "rest"),
    [
        ("train.py", "train.py", ""),
        ("--nproc 4 train.py --lr 1", "--nproc 4 train.py", "--lr 1"),
        ("train.py --nproc 4 --lr 1", "train.py --nproc 4", "--lr 1"),
        ("train.py --nproc=4 -m x --nproc 2", "train.py --nproc=4 -m", "x --nproc 2"),
        ("-n4 train.py -n 2", "-n4 train.py -n 2", ""),
        ("-m pkg.mod -n 2 a b", "-m pkg.mod -n 2", "a b"),
        ("train.py -- --nproc 4", "train.py", "--nproc 4"),
        ("train.py --help", "train.py", "--help"),
        ("--help", "--help", ""),
        ("--unknown train.py", "--unknown train.py", ""),
        ("train.py --lr 1 --nproc 4", "train.py", "--lr 1 --nproc 4"),
        ("train.py - x", "train.py", "- x"),
        ("--nproc", "--nproc", ""),
        ("", "", ""),
    ],
)
def test_split(line: str, ours: str, rest: str) -> None:
    assert split(line.split(), OPTIONS) == (ours.split(), rest.split())
