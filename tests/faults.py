"""`python -m tests.faults` runs the tests in which something breaks on purpose, and writes docs/evidence/faults.md."""

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
HEAD = """# Faults

What is broken on purpose, what must come of it, and whether it did: each row is one or more tests that kill, fill up, flip or withhold something on real ranks.

"""


class Fault(NamedTuple):
    """A fault, what must follow, and the test that shows it (a file, and a part of test names)."""

    what: str
    then: str
    file: str
    name: str


FAULTS = (
    Fault(
        "a rank is killed (kill -9) at ten random steps, and the run started again each time",
        "the weights at the end are those of a run that was not disturbed, to the bit",
        "tests/trainer/test_killed_runs.py",
        "test_ten_kills_at_random_steps_change_no_bit",
    ),
    Fault(
        "a rank is killed under `colonnade run --max-restarts`",
        "all ranks start again by themselves and end as the undisturbed run",
        "tests/trainer/test_killed_runs.py",
        "test_a_run_that_is_started_again_by_the_launcher_ends_as_the_undisturbed_one",
    ),
    Fault(
        "a rank on the second of two hosts is killed under torchrun and `colonnade run`, `--max-restarts`",
        "all ranks of both hosts start again by themselves and end as the undisturbed run, to the bit",
        "tests/hosts/test_kills.py",
        "test_a_job_on_two_hosts_comes_back_after_each_kill_under_torchrun_and_colonnade_run",
    ),
    Fault(
        "a kill at any point of a save",
        "the checkpoint before, or the new one, loads; never a mixture",
        "tests/checkpoint/storage/test_writer.py",
        "test_a_kill_at_any_point_leaves_the_last_or_the_new_checkpoint",
    ),
    Fault(
        "another rank is killed during a save",
        "the checkpoint before loads",
        "tests/checkpoint/storage/test_writer.py",
        "test_a_kill_of_another_rank_leaves_the_last_checkpoint",
    ),
    Fault(
        "the disk fails or is full in the middle of a save",
        "an error on every rank; earlier checkpoints stay",
        "tests/checkpoint/storage/test_writer.py",
        "test_a_failed_save_harms_nothing",
    ),
    Fault(
        "200 random changes to the files of a checkpoint",
        "none loads in silence",
        "tests/checkpoint/storage/test_verify.py",
        "test_none_of_200_mutations_loads_in_silence",
    ),
    Fault(
        "any single bit of a manifest flipped",
        "refused",
        "tests/checkpoint/storage/test_verify.py",
        "test_no_single_bit_of_a_manifest_may_change",
    ),
    Fault(
        "two runs write to one folder; one of them was killed",
        "the second is refused and told who holds it; a dead run's lock is taken over",
        "tests/checkpoint/storage/test_lock.py",
        "test_the_second_run_is_told_who_holds_the_folder or test_the_lock_of_a_killed_run_is_taken_over",
    ),
    Fault(
        "a rank never comes to the start, or its config is refused",
        "the others stop, and say which",
        "tests/test_launch.py",
        "test_a_rank_that_never_comes_is_not_waited_for_longer_than_asked or test_a_config_that_is_refused_on_one_rank",
    ),
    Fault(
        "a rank has another config, or other versions of torch and colonnade",
        "an error on every rank in `launch`, with the key, the values and the ranks",
        "tests/test_launch.py",
        "test_configs_and_versions_that_differ_are_named_on_every_rank",
    ),
    Fault(
        "one rank's weights change in the middle of a run",
        "the guard names the parameter and the rank",
        "tests/engine/checks/test_guard.py",
        "test",
    ),
    Fault(
        "a gradient is NaN or inf on one rank",
        "the step is dropped on all, and the parameter named",
        "tests/engine/test_skips.py",
        "test",
    ),
)


def result(fault: Fault) -> tuple[int, int, float]:
    """(Tests that passed, tests that ran, seconds)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.xml"
        command = [sys.executable, "-m", "pytest", "-q", fault.file, "-k", fault.name, f"--junit-xml={path}"]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
        suite = next(ElementTree.parse(path).getroot().iter("testsuite")).attrib
    ran = int(suite["tests"]) - int(suite["skipped"])
    return ran - int(suite["failures"]) - int(suite["errors"]), ran, float(suite["time"])


def main() -> None:
    """Run all, write the page, and fail if a row does."""
    rows, failed = [], False
    for fault in FAULTS:
        passed, ran, seconds = result(fault)
        failed |= passed < ran or ran == 0
        held = "yes" if passed == ran > 0 else "NO"
        rows.append(
            f"| {fault.what} | {fault.then} | {held}: {passed} of {ran} tests | `{fault.file}` | {seconds:.0f} |"
        )
        print(rows[-1], flush=True)
    table = ["| fault | what must follow | does it | tests | s |", "|---|---|---|---|---|", *rows]
    PAGE.write_text(HEAD + stamp("python -m tests.faults") + "\n\n" + "\n".join(table) + "\n", encoding="utf-8")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
