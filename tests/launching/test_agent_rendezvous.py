"""Which interfaces the sockets of a job listen on, and that no port is taken between its choice and the start."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from colonnade.context import rendezvous
from colonnade.errors import LaunchError
from colonnade.launching import launcher
from colonnade.testing.hosts import colonnade_run, listening, two_hosts, wait_until, why_not
from tests.cli import colonnade, command, environment

needs_hosts = pytest.mark.skipif(bool(why_not()), reason=why_not())

SCRIPT = """
import json, os, sys, time
from pathlib import Path

import torch.distributed as dist

import colonnade
from colonnade.testing.hosts import listening

if sys.argv[1] == "torch":
    dist.init_process_group("gloo")
else:
    colonnade.launch({}, verbose=False)
dist.barrier()
if os.environ["RANK"] == "0":
    print(json.dumps([address for address, port in listening() if port == int(os.environ["MASTER_PORT"])]))
if len(sys.argv) > 2:
    Path(sys.argv[2], os.environ["RANK"]).write_text("up")
    time.sleep(60)
dist.barrier()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return file


@pytest.mark.parametrize("how", ["torch", "ours"])
def test_on_one_machine_the_store_listens_on_the_loopback_interface_alone(script: Path, how: str) -> None:
    done = colonnade("run", "--nproc", 2, script, how)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0]) == ["127.0.0.1"]


def test_a_rank_0_that_serves_the_store_itself_listens_on_the_jobs_address_alone(script: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, script, "ours"],
            env={
                **environment(),
                "RANK": rank,
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert json.loads(outputs[0]) == ["127.0.0.1"]


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("how", ["torch", "ours"])
def test_on_several_machines_all_sockets_of_a_job_listen_on_its_addresses_alone(script: Path, how: str) -> None:
    ranks = [script.parent / str(rank) for rank in range(4)]
    with two_hosts() as hosts:
        for host in hosts:
            host.start(colonnade_run(script, how, script.parent), script.parent / host.name, {"OMP_NUM_THREADS": "1"})
        assert wait_until(lambda: all(rank.exists() for rank in ranks), 90), [
            (script.parent / host.name).read_text() for host in hosts
        ]
        for host in hosts:
            assert {address for address, _ in host.listening()} == {host.address}, host.listening()
        # Nothing but gloo's sockets on the second, one for each group of each rank.
        assert ("10.77.0.1", 29500) in hosts[0].listening()


@needs_hosts
def test_on_one_machine_no_socket_of_a_job_listens_elsewhere(script: Path) -> None:
    words = (sys.executable, "-m", "colonnade.cli", "run", "--nproc", 2, script, "ours", script.parent)
    with two_hosts() as (host, _):
        host.start(words, script.parent / "log", {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
        assert wait_until(lambda: (script.parent / "0").exists() and (script.parent / "1").exists(), 60)
        assert {address for address, _ in host.listening()} == {"127.0.0.1"}


def test_a_name_that_other_machines_know_by_another_address_is_not_taken_for_loopback(monkeypatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    assert rendezvous.listening_at("node", 0, one_host=False) is None  # as Debian writes it in /etc/hosts
    for host, one_host in (("node", True), ("localhost", False), ("127.0.0.1", False)):
        held = rendezvous.listening_at(host, 0, one_host)
        assert held is not None
        with held:
            assert held.getsockname()[0] == "127.0.0.1"
    found[0] = (*found[0][:4], ("192.0.2.1", 0))  # type: ignore[assignment]
    with pytest.raises(OSError, match="assign"):
        rendezvous.listening_at("elsewhere", 0, one_host=False)


def test_the_port_of_the_ranks_is_never_free_between_its_choice_and_the_start() -> None:
    store = launcher.serve_store("127.0.0.1", 0, one_host=True)
    assert ("127.0.0.1", store.port) in listening()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", store.port))


def test_a_port_that_torch_found_free_and_another_took_is_not_used(script: Path, tmp_path: Path) -> None:
    # What torch's agent would give the ranks: a port that it found free, and that is taken by now.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        patch = f"import torch.distributed.elastic.rendezvous.api as api; api.get_free_port = lambda: {port}"
        starts = f"{patch}\nfrom colonnade.cli import main\nmain()"
        words = [sys.executable, "-c", starts, *command("run", "--nproc", 2, script, "torch")[3:]]
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0]) == ["127.0.0.1"]


@pytest.mark.parametrize("place", [None, "0", "1"])
def test_a_port_of_the_endpoint_that_a_stranger_holds_is_named_and_not_waited_for_without_end(
    monkeypatch, place
) -> None:
    monkeypatch.setattr(launcher, "_SECONDS", 2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        given = {} if place is None else {"rank": place}
        params = RendezvousParameters("any", endpoint, "none", 2, 2, **given)
        with pytest.raises(LaunchError, match=rf"machines cannot connect at {endpoint}: .*--rdzv-endpoint.*\[C021\]"):
            launcher.make_handler(params) if place is None else launcher.make_static_handler(params).next_rendezvous()
