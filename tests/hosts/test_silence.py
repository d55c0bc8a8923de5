"""A rank that is stopped on another host, and a host that is cut off: what the ranks that wait say of them, and the error that ends the wait."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from colonnade.testing.hosts import DEVICE, colonnade_run, torchrun, two_hosts, wait_until, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]

SCRIPT = Path(__file__).with_name("waiting.py")


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        pytest.param(torchrun, "stop", id="stopped", marks=pytest.mark.long),
        pytest.param(colonnade_run, "cut", id="cut off"),
    ],
)
def test_a_rank_that_is_heard_no_more_is_named_with_its_host_and_so_is_it_in_the_error(
    tmp_path: Path, launcher, how
) -> None:
    with two_hosts() as (alpha, beta):
        logs = [tmp_path / "alpha.log", tmp_path / "beta.log"]
        started = [
            host.start(launcher(SCRIPT, tmp_path), log, {"OMP_NUM_THREADS": "1"})
            for host, log in zip((alpha, beta), logs, strict=True)
        ]
        assert wait_until(lambda: all((tmp_path / f"rank{rank}").exists() for rank in range(4)), 120), logs[
            0
        ].read_text()
        ranks = beta.ranks()
        if how == "stop":
            os.kill(ranks[3], signal.SIGSTOP)
        else:
            subprocess.run(["nsenter", "-t", str(beta.first), "-n", "ip", "link", "set", DEVICE, "down"], check=True)
        assert wait_until(lambda: started[0].poll() is not None, 100), logs[0].read_text()
        said, there = (log.read_text() for log in logs)
        state = (
            r"rank 3 \(host beta\): silent for \d+ s: stopped or dead, while other ranks of its host send heartbeats"
            if how == "stop"
            else r"rank 2, 3 \(host beta\): silent for \d+ s: its host is dead, or cut off"
        )
        # The rank that looks may be one of the other host, which sees that the process is stopped.
        seen = rf"has waited \d+ s: .*({state}|rank 3 \(host beta\): stopped \(by SIGSTOP)"
        assert re.search(seen, said + there), said + there
        assert re.search(
            rf"GradientError: .* has timed out .*({state}|rank 3 \(host beta\): stopped).*\[C117\]", said
        ), said
        assert "rank 3: going on" not in said + there
        if how == "cut":
            assert "But the store of the world, served by rank 0 (host alpha), does not answer" in there, there
