"""A rank of the second host is killed: all ranks start again by themselves, and the end is the same to the bit."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from colonnade.testing.hosts import listening, two_hosts, wait_until, why_not
from tests.hosts.kills import counts, killed, undisturbed

needs_hosts = pytest.mark.skipif(bool(why_not()), reason=why_not())
KILLS, STEPS = 3, 30


@pytest.mark.long
@pytest.mark.timeout(900)
@needs_hosts
def test_a_job_on_two_hosts_comes_back_after_each_kill_under_torchrun_and_colonnade_run(tmp_path: Path) -> None:
    truth = undisturbed(tmp_path / "undisturbed", STEPS)
    for launcher in ("torchrun", "colonnade"):
        back, job = killed(tmp_path / launcher, launcher, KILLS, STEPS)
        assert back == KILLS, job.logs()
        assert job.digests() == truth
        if launcher == "colonnade":  # torchrun counts on each host what it saw fail itself
            counted = (job.folder / "counts").read_text().split()[-4:]
            assert int(counted[0]) >= KILLS, counted
            assert len(set(counted)) == 1, counted


@pytest.mark.long
@pytest.mark.timeout(300)
@needs_hosts
def test_on_two_hosts_shards_lie_inside_a_host_urls_are_refused_and_the_store_is_asked_for_few_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With DETAIL, torch makes a second gloo group for every group, through the store.
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
    found = counts(tmp_path / "run", "colonnade")
    assert [told["host"] for told in found] == ["alpha", "alpha", "beta", "beta"]
    assert [told["shards"] for told in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [told["replicas"] for told in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [told["refused"] for told in found] == ["C120"] * 4
    assert not any(told["left in the folder"] for told in found)
    assert sum(told["launch"] for told in found) <= 40 * 4, found
    assert sum(told["wait"] for told in found) <= 40 * 4, found  # of 20 s


HOLDS = "import socket, time; held = socket.create_server(('', 7777)); print('up', flush=True); time.sleep(600)"


@needs_hosts
def test_two_hosts_have_names_addresses_and_processes_of_their_own(tmp_path: Path) -> None:
    with two_hosts() as (one, two):
        assert [host.output("hostname").strip() for host in (one, two)] == ["alpha", "beta"]
        one.start([sys.executable, "-c", HOLDS], tmp_path / "log", {"RANK": "3"})
        assert wait_until(lambda: (tmp_path / "log").read_text() == "up\n", 20)
        assert one.listening() == [("0.0.0.0", 7777)]
        assert two.listening() == []
        asks = "import socket; print(socket.create_connection(('alpha', 7777)).getpeername()[0])"
        assert two.output(sys.executable, "-c", asks).strip() == "10.77.0.1"
        assert [*one.ranks()] == [3]
        os.kill(one.ranks()[3], signal.SIGKILL)
        assert wait_until(lambda: not one.processes(), 20)
    # Where its parent was killed first, it is init that takes it away.
    assert wait_until(lambda: not Path(f"/proc/{one.first}").exists(), 20)


@needs_hosts
def test_hosts_end_with_the_process_that_made_them() -> None:
    script = "from colonnade.testing.hosts import *\nwith two_hosts() as (a, b):\n    print(a.first, flush=True)\n    time.sleep(600)"
    maker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    first = int(maker.stdout.readline())
    maker.kill()
    maker.wait()
    assert wait_until(lambda: not Path(f"/proc/{first}").exists(), 20)


def test_sockets_that_listen_are_found_with_their_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("::", 0), family=socket.AF_INET6) as two:
        here = ("127.0.0.1", one.getsockname()[1])
        assert here in listening()
        assert ("::", two.getsockname()[1]) in listening()
    assert here not in listening()
