"""Which rank is blamed, and how the report ends."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from colonnade.cli._failures import Failure, first_failure, report
from colonnade.cli._record import Record, read_record, write_record

NOWHERE = Path("/nonexistent")


def raised(rank: int, time: float, headline: str = "ValueError: boom") -> Failure:
    return Failure(rank, 1, time + 1, Record(headline, f"Traceback of {rank}\n{headline}\n", 1, time), NOWHERE)


def ended(rank: int, seen: float) -> Failure:
    return Failure(rank, -signal.SIGTERM, seen, None, NOWHERE)


def killed(rank: int, seen: float, number: int = signal.SIGKILL, stderr: Path = NOWHERE) -> Failure:
    return Failure(rank, -number, seen, None, stderr)


def test_the_first_by_time_is_blamed() -> None:
    assert first_failure([raised(0, 5.0), raised(1, 4.9)]).rank == 1


def test_a_rank_the_launcher_ended_is_not_blamed() -> None:
    assert first_failure([ended(0, 1.0), raised(1, 5.0)]).rank == 1


def test_a_silent_death_is_blamed_before_the_peers_that_noticed_it() -> None:
    peers = [raised(0, 10.1, "RuntimeError: Connection closed by peer"), raised(2, 10.2)]
    assert first_failure([*peers, killed(1, 10.9)]).rank == 1


def test_a_rank_killed_long_after_the_first_failure_is_not_blamed() -> None:
    assert first_failure([raised(0, 10.0), killed(1, 15.0)]).rank == 0


def test_the_traceback_comes_last_and_alone() -> None:
    text = report([ended(2, 9.0), raised(1, 5.0), raised(0, 6.0, "RuntimeError: lost a peer")])
    assert text.splitlines() == [
        "rank 0: RuntimeError: lost a peer",
        "rank 2: ended by the launcher",
        "colonnade: rank 1 failed first, exit status 1",
        "Traceback of 1",
        "ValueError: boom",
    ]


def test_a_silent_death_ends_in_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "rank1.stderr"
    log.write_text("".join(f"line {i}\n" for i in range(100)))
    lines = report([killed(1, 5.0, signal.SIGABRT, log), ended(0, 6.0)]).splitlines()
    assert lines[1] == "colonnade: rank 1 failed first, exit status 134: killed by SIGABRT"
    assert lines[-1] == "line 99"
    assert len(lines) < 30


@pytest.mark.parametrize(("code", "status"), [(3, 3), (-9, 137), (-15, 143), (-6, 134)])
def test_exit_status_is_a_shells(code: int, status: int) -> None:
    assert Failure(0, code, 0.0, None, NOWHERE).status == status


def test_a_rank_ended_while_it_was_leaving_counts_with_the_status_it_was_leaving_with() -> None:
    leaving = Failure(1, -signal.SIGTERM, 6.0, Record("SystemExit: 3", "", 3, 5.0), NOWHERE)
    noticed = raised(0, 5.2, "RuntimeError: Connection closed by peer")
    assert first_failure([noticed, leaving]).status == 3
    assert report([noticed, leaving]).splitlines()[-1] == (
        "colonnade: rank 1 failed first, exit status 3: SystemExit: 3"
    )


def test_a_record_survives_the_file(tmp_path: Path) -> None:
    write_record(tmp_path / "record", "ValueError: x", "Traceback ü\n", 4)
    record = read_record(tmp_path / "record")
    assert record is not None
    assert (record.headline, record.traceback, record.status) == ("ValueError: x", "Traceback ü\n", 4)
    assert read_record(tmp_path / "other") is None
    assert [file.name for file in tmp_path.iterdir()] == ["record"]
