"""Which rank is blamed, and how the report ends."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from colonnade.config import load_config
from colonnade.errors import ConfigError
from colonnade.launching.outcome import (
    Outcome,
    description,
    exit_status,
    first_failure,
    launch_report,
    read_failure,
    silent_failure,
    write_failure,
)

NOWHERE = Path("/nonexistent")


def raised(rank: int, time: float, kind: str = "ValueError", message: str = "boom") -> Outcome:
    traceback = f"Traceback of {rank}\n{kind}: {message}\n"
    return Outcome(rank, "exception", time, type=kind, message=message, traceback=traceback, exitcode=1)


def ended(rank: int, seen: float) -> Outcome:
    return silent_failure(rank, -signal.SIGTERM, seen)


def killed(rank: int, seen: float, number: int = signal.SIGKILL) -> Outcome:
    return silent_failure(rank, -number, seen)


def blamed(*outcomes: Outcome) -> int:
    first = first_failure(outcomes)
    assert first is not None
    return first.rank


def told(*outcomes: Outcome, stderr: Path = NOWHERE) -> list[str]:
    text, status = launch_report(
        {outcome.rank: outcome for outcome in outcomes}, {outcome.rank: stderr for outcome in outcomes}
    )
    assert f"exit status {status}" in text
    return text.splitlines()


def test_the_first_by_time_is_blamed() -> None:
    assert blamed(raised(0, 5.0), raised(1, 4.9)) == 1


def test_a_rank_the_launcher_ended_is_not_blamed() -> None:
    assert blamed(ended(0, 1.0), raised(1, 5.0)) == 1


def test_a_silent_death_is_blamed_before_the_peers_that_noticed_it() -> None:
    peers = [raised(0, 10.1, "RuntimeError", "Connection closed by peer"), raised(2, 10.2)]
    assert blamed(*peers, killed(1, 10.9)) == 1


def test_a_rank_killed_long_after_the_first_failure_is_not_blamed() -> None:
    assert blamed(raised(0, 10.0), killed(1, 15.0)) == 0


def told_of(rank: int, time: float, *of: int, consequence: Any = "wholly") -> Outcome:
    return replace(raised(rank, time, "PeerFailed", "another"), consequence=consequence, named_ranks=of)


def test_a_rank_that_was_told_of_a_failure_is_never_blamed_however_early() -> None:
    assert blamed(told_of(0, 1.0, 1), raised(1, 9.0)) == 1
    assert blamed(told_of(0, 1.0, 1), killed(1, 9.0)) == 1
    # Both failed by themselves; the one that was dealing with the other's failure comes second.
    assert blamed(told_of(0, 1.0, 1, consequence="partly"), raised(1, 9.0)) == 1
    assert blamed(told_of(0, 9.0, 1), told_of(2, 9.5, consequence="partly")) == 2


def test_where_the_rank_that_failed_left_nothing_the_one_that_was_told_says_who_it_was() -> None:
    assert told(told_of(0, 5.0, 1), ended(1, 6.0), ended(2, 6.0)) == [
        "rank 2: ended because rank 1 was gone",
        "colonnade: rank 1 failed first, according to rank 0, exit status 1",
        "Traceback of 0",
        "PeerFailed: another",
    ]


def test_where_all_only_lost_a_rank_nobody_is_said_to_have_failed_first() -> None:
    lost = [raised(rank, 5.0 + rank, "RuntimeError", "Connection closed by peer") for rank in (0, 1)]
    lines = told(*lost)
    assert lines[0] == "rank 1: ended because another rank was gone"
    assert lines[1].startswith(
        "colonnade: rank 0 lost another rank, and no rank on this host reported a failure of its own"
    )
    assert not any("failed first" in line for line in lines)


def test_the_traceback_comes_last_and_alone() -> None:
    assert told(ended(2, 9.0), raised(1, 5.0), raised(0, 6.0, "RuntimeError", "lost a peer")) == [
        "rank 0: RuntimeError: lost a peer",
        "rank 2: ended because rank 1 was gone",
        "colonnade: rank 1 failed first, exit status 1",
        "Traceback of 1",
        "ValueError: boom",
    ]


def test_after_a_silent_death_its_last_words_come_before_the_verdict_without_torchs_stack(tmp_path: Path) -> None:
    log = tmp_path / "rank1.stderr"
    stack = "Exception raised from recv at x.cpp:3\nframe #0: c10::Error + 0x9\nframe #1: <unknown>\n"
    log.write_text("".join(f"line {i}\n" for i in range(99)) + stack + "line 99\n")
    lost = [raised(rank, 6.0, "RuntimeError", "Connection closed by peer") for rank in (0, 2)]
    lines = told(killed(1, 5.0, signal.SIGABRT), ended(3, 6.0), *lost, stderr=log)
    assert lines[0] == "ranks 0, 2, 3: ended because rank 1 was gone"
    assert lines[-4:] == [
        "line 98",
        "(3 lines of a torch stack)",
        "line 99",
        "colonnade: rank 1 failed first, exit status 134: killed by SIGABRT",
    ]
    assert len(lines) < 30


@pytest.mark.parametrize(("code", "status"), [(3, 3), (-9, 137), (-15, 143), (-6, 134), (-250, 378)])
def test_exit_status_is_a_shells(code: int, status: int) -> None:
    assert exit_status(silent_failure(0, code, 0.0)) == status


def test_a_rank_ended_while_it_was_leaving_counts_with_the_status_it_was_leaving_with() -> None:
    leaving = Outcome(1, "exception", 5.0, type="SystemExit", message="3", exitcode=3)
    noticed = raised(0, 5.2, "RuntimeError", "Connection closed by peer")
    assert told(noticed, leaving)[-1] == "colonnade: rank 1 failed first, exit status 3: SystemExit: 3"


def test_what_a_rank_left_survives_the_file(tmp_path: Path) -> None:
    fields = {"kind": "exception", "type": "ValueError", "message": "x", "traceback": "Traceback ü\n"}
    write_failure(tmp_path / "note", fields, 4)
    found = read_failure(2, tmp_path / "note")
    assert found is not None
    assert (found.headline, found.traceback, found.exitcode) == ("rank 2: ValueError: x", "Traceback ü\n", 4)
    assert read_failure(2, tmp_path / "other") is None
    assert [file.name for file in tmp_path.iterdir()] == ["note"]


def test_the_traceback_of_a_config_error_ends_at_the_users_line() -> None:
    with pytest.raises(ConfigError) as raised_here:
        load_config({"clip_grad_nrom": 1.0})
    error = raised_here.value
    frames = [line for line in description(error, [], fold_library=True)["traceback"].splitlines() if "File " in line]
    assert [line.split('"')[1] for line in frames] == [__file__]
    assert "config.py" in description(error, [])["traceback"]
    assert (
        "config.py" in description(error, [__file__], fold_library=True)["traceback"]
    )  # without user code: all frames


def test_the_verdict_names_the_page_of_an_error_that_has_a_code() -> None:
    assert told(raised(0, 5.0, "LedgerError", "a sum is owed [C040]"))[0] == (
        "colonnade: rank 0 failed first, exit status 1; details: colonnade explain C040"
    )
