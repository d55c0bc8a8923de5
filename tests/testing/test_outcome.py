"""The report of a failed world: who is blamed, and what is said."""

from __future__ import annotations

from typing import Any

from colonnade.testing import Outcome, WorldError, WorldResult


def result_of(*outcomes: Outcome, stderr: str = "") -> WorldResult:
    n = len(outcomes)
    return WorldResult(outcomes=outcomes, stdout=("",) * n, stderr=(stderr,) * n, seconds=1.0)


def raised(rank: int, time: float, message: str, **rest: Any) -> Outcome:
    return Outcome(rank, "exception", time, type="RuntimeError", message=message, **rest)


def test_no_failure_has_no_cause() -> None:
    result = result_of(Outcome(0, "value", 1.0, value=7), Outcome(1, "value", 2.0, value=8))
    assert result.ok
    assert result.root_cause is None
    assert result.values == [7, 8]
    assert "all 2 ranks returned" in result.report()


def test_the_first_failure_by_time_is_the_cause() -> None:
    result = result_of(raised(0, 5.0, "late"), raised(1, 4.0, "early"))
    assert WorldError(result).rank == 1


def test_a_lost_peer_is_a_consequence_even_when_noticed_first() -> None:
    # The parent learns of a kill only after the peers have seen their sockets close.
    noticed = raised(0, 1.0, "[gloo] Connection closed by peer [127.0.0.1]:4242")
    killed = Outcome(1, "signal", 1.5, signal="SIGKILL", exitcode=-9)
    assert WorldError(result_of(noticed, killed)).rank == 1


def test_a_lost_peer_is_the_cause_when_nothing_else_is_known() -> None:
    result = result_of(raised(0, 1.0, "Connection reset by peer"), Outcome(1, "ended", 2.0))
    assert WorldError(result).rank == 0


def test_a_rank_that_hung_is_blamed_before_one_that_was_stopped() -> None:
    result = result_of(Outcome(0, "ended", 1.0), Outcome(1, "timeout", 2.0))
    assert WorldError(result).rank == 1


def test_report_has_the_cause_in_full_and_one_line_for_each_other_rank() -> None:
    cause = raised(1, 1.0, "boom\nand more", traceback="Traceback: line 3\nRuntimeError: boom\n")
    other = raised(0, 2.0, "other first line\nother second line", traceback="Traceback: elsewhere\n")
    text = result_of(other, cause, Outcome(2, "ended", 3.0), stderr="the log").report()
    assert text.startswith("rank 1: RuntimeError: boom")
    assert "Traceback: line 3" in text
    assert "--- stderr of rank 1\nthe log" in text
    assert "rank 0: RuntimeError: other first line\nrank 2: stopped because another rank had failed" in text
    assert "other second line" not in text
    assert "elsewhere" not in text


def test_report_cuts_a_long_log_from_the_front() -> None:
    log = "\n".join(f"line {i}" for i in range(500))
    text = result_of(raised(0, 1.0, "boom"), stderr=log).report()
    assert "line 499" in text
    assert "line 400" not in text
    assert "of 500 lines" in text


def test_where_a_stopped_rank_was_is_the_users_line() -> None:
    stack = (
        'Thread 0x1 (most recent call first):\n  File "/a/helper.py", line 9 in idle\n\n'
        "Current thread 0x2 (most recent call first):\n"
        '  File "/x/site-packages/torch/distributed/c10d.py", line 3 in all_reduce\n'
        '  File "/a/mine.py", line 5 in step\n'
    )
    headline = Outcome(2, "timeout", 1.0, stack=stack).headline
    assert headline == 'rank 2: still running at the deadline, in File "/a/mine.py", line 5 in step'
