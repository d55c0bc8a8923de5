"""`colonnade verify`: the exit code says whether a script is equal to one process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from colonnade.cli import main

LOOP = Path(__file__).parents[1] / "proof" / "scripts" / "of_users" / "loop.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def verify(capsys):
    """Run `colonnade verify` in this process, and the script in others."""

    def run(*words: str) -> SimpleNamespace:
        with pytest.raises(SystemExit) as ended:
            main(["verify", *words])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=int(ended.value.code or 0), out=out, err=err)

    return run


def test_equal_is_0_and_json_can_be_read(verify) -> None:
    done = verify("--nproc", "2", "--steps", "3", "--json", str(LOOP))
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["findings"] == []
    assert [line.split()[3:6] for line in done.err.splitlines()] == [["on", "2", "ranks"], ["on", "1", "rank,"]]
    assert {row["step"] for row in report["rows"]} == {None, 0, 1, 2}


def test_different_is_1_and_says_why(verify) -> None:
    done = verify("--nproc", "2", "--steps", "1", "--dtype", "own", str(LOOP), "undivided")
    assert done.code == 1, done.err
    assert "summed-not-averaged" in done.out


def test_not_run_is_2_with_the_words_of_the_script(verify) -> None:
    done = verify("--nproc", "1", str(LOOP), "fail")
    assert done.code == 2
    assert "this script fails by itself" in done.err
    assert "loop.py on 1 rank ... failed after" in done.err


@pytest.mark.parametrize(
    ("how", "seconds", "said"),
    [
        ("hang", "5", "did not finish step 2 on 1 rank within 5 seconds"),
        ("early", "300", "ended on 1 rank without a step, so there is nothing to compare. The script neither builds"),
        (
            "idle",
            "300",
            "ended on 1 rank without a step, so there is nothing to compare. The script builds an engine or calls",
        ),
    ],
)
def test_a_script_that_comes_to_no_step_is_2(verify, how: str, seconds: str, said: str) -> None:
    done = verify("--nproc", "1", "--timeout", seconds, str(LOOP), how)
    assert done.code == 2
    assert said in done.err
    assert how == "hang" or "Traceback" not in done.err


def test_a_script_that_leaves_early_is_compared_as_far_as_it_came(verify) -> None:
    done = verify("--nproc", "1", str(LOOP), "short")
    assert done.code == 0, done.err
    assert "1 of 2 steps were compared: the script took no more" in done.out


def test_random_numbers_that_cannot_be_repeated_are_2_with_the_module(verify) -> None:
    done = verify("--nproc", "2", str(LOOP.parent / "draws.py"), "depth_by_rank")
    assert done.code == 2, done.err
    assert done.out.startswith("cannot tell whether the run matches a single-process run")
    assert "module 2: ranks with distinct data draw different numbers" in done.out


def test_a_planted_mistake_that_does_not_exist_is_2(verify) -> None:
    done = verify("--nproc", "2", "--json", "--mutate", "--mistakes", "clip-thrice", str(LOOP))
    assert done.code == 2
    assert "clip-thrice" in done.err
