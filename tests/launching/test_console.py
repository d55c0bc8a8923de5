"""How several ranks share one console."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from colonnade.launching.launch_job import Prefix
from colonnade.launching.launcher import Console


class Ranks:
    """Two ranks' logs, followed by a console that writes to memory."""

    def __init__(self, folder: Path, prefix: Prefix) -> None:
        self.out, self.err = io.BytesIO(), io.BytesIO()
        self.console = Console(prefix, self.out, self.err)
        self.files = [(rank, folder / f"{rank}.out", folder / f"{rank}.err") for rank in range(2)]
        self.console.follow(self.files)

    def write(self, rank: int, content: bytes, stream: int = 1) -> None:
        with Path(str(self.files[rank][stream])).open("ab") as log:
            log.write(content)
        self.console._copy_once()


@pytest.mark.parametrize(
    ("prefix", "shown"),
    [
        ("others", b"a\n[rank 1] b\n[rank 1] c\n"),
        ("all", b"[rank 0] a\n[rank 1] b\n[rank 1] c\n"),
        ("none", b"a\nb\nc\n"),
    ],
)
def test_prefixes(tmp_path: Path, prefix: Prefix, shown: bytes) -> None:
    ranks = Ranks(tmp_path, prefix)
    ranks.write(0, b"a\n")
    ranks.write(1, b"b\nc\n")
    ranks.console.close()
    assert ranks.out.getvalue() == shown
    assert ranks.err.getvalue() == b""


def test_stderr_stays_stderr(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "others")
    ranks.write(1, b"oops\n", stream=2)
    ranks.console.close()
    assert (ranks.out.getvalue(), ranks.err.getvalue()) == (b"", b"[rank 1] oops\n")


def test_a_prefixed_rank_is_shown_by_whole_lines_and_its_last_half_line_at_the_end(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "others")
    ranks.write(1, b"half")
    assert ranks.out.getvalue() == b""
    ranks.write(1, b" and half\nno end")
    assert ranks.out.getvalue() == b"[rank 1] half and half\n"
    ranks.console.close()
    assert ranks.out.getvalue() == b"[rank 1] half and half\n[rank 1] no end\n"


def test_an_open_line_of_rank_0_is_shown_at_once_and_ended_before_another_rank(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "others")
    ranks.write(0, b"working...")
    assert ranks.out.getvalue() == b"working..."
    ranks.write(1, b"done\n")
    assert ranks.out.getvalue() == b"working...\n[rank 1] done\n"


def test_a_progress_bar_of_rank_0_is_passed_on_unchanged(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "others")
    for part in (b"\r 10%", b"\r 20%", b"\r100%\n"):
        ranks.write(0, part)
    ranks.console.close()
    assert ranks.out.getvalue() == b"\r 10%\r 20%\r100%\n"


def test_what_follows_the_mark_is_left_for_the_report(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "others")
    ranks.write(1, b"before\n\x1e\nTraceback\n", stream=2)
    ranks.write(1, b"more of it\n", stream=2)
    ranks.write(0, b"\x1e\nTraceback\n", stream=2)
    ranks.console.close()
    assert ranks.err.getvalue() == b"[rank 1] before\n"


def test_a_long_log_is_shown_whole(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "others")
    lines = b"".join(b"%d %s\n" % (i, b"x" * 100) for i in range(20_000))
    ranks.files[0][1].write_bytes(lines)
    ranks.console.close()
    assert ranks.out.getvalue() == lines


def test_a_restart_is_followed_from_its_own_beginning(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "others")
    ranks.write(0, b"first try")
    again = tmp_path / "again"
    ranks.console.follow([(0, again, again)])
    again.write_bytes(b"second try\n")
    ranks.console.close()
    assert ranks.out.getvalue() == b"first try\nsecond try\n"


def test_our_own_messages_begin_on_a_line_of_their_own(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "others")
    ranks.write(0, b"open", stream=2)
    ranks.console.say("colonnade: note")
    assert ranks.err.getvalue() == b"open\ncolonnade: note\n"


def test_a_reader_that_goes_away_does_not_stop_the_job(tmp_path: Path) -> None:

    reading, writing = os.pipe()
    target: BinaryIO = os.fdopen(writing, "wb")
    os.close(reading)
    console = Console("others", target, io.BytesIO())
    log = tmp_path / "log"
    log.write_bytes(b"nobody reads this\n")
    console.follow([(0, log, tmp_path / "none")])
    console.close()
    target.write(b"nor this")
    target.close()
