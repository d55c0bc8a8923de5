"""`python -m tests.faults` runs the fault injection tests, and writes docs/evidence/faults.md."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests.evidence import stamp

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence" / "faults.md"
HEAD = """# Fault injection

Each row is one or more tests that inject a fault (killed processes, full disks, flipped bits, missing ranks) and check the reaction.

"""


class Fault(NamedTuple):
    """A fault, the expected reaction, and its tests: a file, and a part of their names."""

    what: str
    then: str
    file: str
    name: str


FAULTS = (
    Fault(
        "a rank is killed (kill -9) at ten random steps, and the run is restarted each time",
        "the final weights are bit-identical to those of an undisturbed run",
        "tests/trainer/test_killed_runs.py",
        "test_ten_kills_at_random_steps_change_no_bit",
    ),
    Fault(
        "a rank is killed under `colonnade run --max-restarts`",
        "all ranks restart automatically, and the run ends like the undisturbed run",
        "tests/trainer/test_killed_runs.py",
        "test_a_run_that_is_started_again_by_the_launcher_ends_as_the_undisturbed_one",
    ),
    Fault(
        "a rank on the second of two hosts is killed under torchrun and under `colonnade run`, with `--max-restarts`",
        "all ranks of both hosts restart automatically, and the final weights are bit-identical to those of the undisturbed run",
        "tests/hosts/test_kills.py",
        "test_a_job_on_two_hosts_comes_back_after_each_kill_under_torchrun_and_colonnade_run",
    ),
    Fault(
        "the process is killed at any point of a save",
        "the previous or the new checkpoint loads, never a mixture",
        "tests/checkpoint/storage/test_writer.py",
        "test_a_kill_at_any_point_leaves_the_last_or_the_new_checkpoint",
    ),
    Fault(
        "another rank is killed during a save",
        "the previous checkpoint loads",
        "tests/checkpoint/storage/test_writer.py",
        "test_a_kill_of_another_rank_leaves_the_last_checkpoint",
    ),
    Fault(
        "the disk fails or is full during a save",
        "saving raises an error; earlier checkpoints remain",
        "tests/checkpoint/storage/test_writer.py",
        "test_a_failed_save_harms_nothing",
    ),
    Fault(
        "200 random changes to the files of a checkpoint",
        "loading raises an error for each change",
        "tests/checkpoint/storage/test_verify.py",
        "test_none_of_200_mutations_loads_in_silence",
    ),
    Fault(
        "a single bit of a manifest is flipped, in every seventh byte",
        "loading raises an error",
        "tests/checkpoint/storage/test_verify.py",
        "test_no_single_bit_of_a_manifest_may_change",
    ),
    Fault(
        "two runs write to one folder; a run that locked the folder was killed",
        "the second run raises an error that names the first; the lock of a killed run is taken over",
        "tests/checkpoint/storage/test_lock.py",
        "test_the_second_run_is_told_who_holds_the_folder or test_the_lock_of_a_killed_run_is_taken_over",
    ),
    Fault(
        "a rank never calls `launch`, or its config raises an error",
        "the other ranks stop with an error that names the rank",
        "tests/test_launch.py",
        "test_a_rank_that_never_comes_is_not_waited_for_longer_than_asked or test_a_config_that_is_refused_on_one_rank",
    ),
    Fault(
        "a rank has a different config, or different versions of torch and colonnade",
        "`launch` raises an error on every rank, with the key, the values and the ranks",
        "tests/test_launch.py",
        "test_configs_and_versions_that_differ_are_named_on_every_rank",
    ),
    Fault(
        "the weights of one rank change during a run",
        "the replica check (`guard`) raises an error that names the parameter and the rank",
        "tests/engine/checks/test_guard.py",
        "test",
    ),
    Fault("a gradient is not finite on one rank", "all ranks skip the step", "tests/engine/test_skips.py", "test"),
)


def result(fault: Fault) -> tuple[int, int, float]:
    """(Number of passed tests, number of executed tests, seconds)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.xml"
        command = [sys.executable, "-m", "pytest", "-q", fault.file, "-k", fault.name, f"--junit-xml={path}"]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
        suite = next(ElementTree.parse(path).getroot().iter("testsuite")).attrib
    ran = int(suite["tests"]) - int(suite["skipped"])
    return ran - int(suite["failures"]) - int(suite["errors"]), ran, float(suite["time"])


def main() -> None:
    """Run all tests and write the page; the exit code is 1 if a test of a row fails."""
    rows, failed = [], False
    for fault in FAULTS:
        passed, ran, seconds = result(fault)
        failed |= passed < ran or ran == 0
        count = f"{passed} of {ran}" if passed == ran > 0 else f"**{passed}** of {ran}"
        rows.append(f"| {fault.what} | {fault.then} | {count} tests passed | `{fault.file}` | {seconds:.0f} |")
        print(rows[-1], flush=True)
    table = ["| fault | expected reaction | result | test file | seconds |", "|---|---|---|---|---|", *rows]
    PAGE.write_text(HEAD + stamp("python -m tests.faults") + "\n\n" + "\n".join(table) + "\n", encoding="utf-8")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
