"""What can be sent to a world, from where, and what its environment is."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade.errors import LaunchError
from colonnade.testing import run_world
from colonnade.testing.world import environments, loopback_socket

ROOT = Path(__file__).parents[2]
NCCL = ("NCCL_HOSTID", "NCCL_NET", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE")


def echo(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


class Namespace:
    @staticmethod
    def method() -> str:
        return os.environ["RANK"]


def script_output(code: str, *how: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *how],
        input=textwrap.dedent(code),
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
        check=False,
    )


def test_a_lambda_is_refused_with_the_way_out() -> None:
    with pytest.raises(LaunchError, match="Move it to the top level of a module"):
        run_world(2, lambda: 1)


def test_a_local_function_is_refused_with_the_way_out() -> None:
    def local() -> None: ...

    with pytest.raises(LaunchError, match=r"local.*Move it to the top level of a module"):
        run_world(2, local)


def test_an_argument_that_cannot_travel_is_named() -> None:
    with pytest.raises(LaunchError, match="argument 1 of echo"):
        run_world(2, echo, 1, threading.Lock())
    with pytest.raises(LaunchError, match="argument 'lock' of echo"):
        run_world(2, echo, lock=threading.Lock())


def takes_anything(**options: object) -> dict[str, object]:
    return options


def takes_init(init: str) -> str:
    return init


def test_the_older_spelling_of_backend_is_refused_and_not_passed_on() -> None:
    for fn in (takes_anything, print):
        with pytest.raises(LaunchError, match=r"no keyword init .* Pass backend='nccl'.*\[C115\]"):
            run_world(1, fn, init="nccl")
    assert run_world(1, takes_init, init="mine").values == ["mine"]
    assert run_world(1, takes_anything, backend=None, lr=2).values == [{"lr": 2}]


def test_a_static_method_can_be_run() -> None:
    assert run_world(2, Namespace.method, backend=None).values == ["0", "1"]


@pytest.mark.parametrize(("n", "timeout"), [(0, 60), (-1, 60), (2, 0), (2, -1.0)])
def test_impossible_worlds_are_refused(n: int, timeout: float) -> None:
    with pytest.raises(LaunchError, match=r"needs at least 1 rank|give a number of seconds"):
        run_world(n, echo, timeout=timeout)


def test_environment_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FROM_PARENT", "kept")
    monkeypatch.setenv("TAKEN_AWAY", "x")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("RANK", "99")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "stale")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    *_, env = environments(4, tmp_path, 4242, {"TAKEN_AWAY": None, "TORCH_DISTRIBUTED_DEBUG": "OFF"})
    assert env["RANK"] == env["LOCAL_RANK"] == "3"
    assert env["FROM_PARENT"] == "kept"
    assert "TAKEN_AWAY" not in env
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["TORCH_DISTRIBUTED_DEBUG"] == "OFF"
    assert env["MASTER_PORT"] == "4242"
    assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "4"
    assert "TORCHELASTIC_RUN_ID" not in env
    assert env["GLOO_SOCKET_IFNAME"] == "lo" or sys.platform != "linux"


def test_a_reserved_port_can_be_listened_on_by_a_store_and_is_given_to_nobody_else() -> None:
    with loopback_socket(listening=False) as held, loopback_socket(listening=False) as other:
        port = held.getsockname()[1]
        assert port != other.getsockname()[1]
        store = torch.distributed.TCPStore("127.0.0.1", port, 1, True)
        store.set("key", "value")
        assert store.get("key") == b"value"


@pytest.mark.slow
def test_a_function_typed_at_a_prompt_runs() -> None:
    done = script_output(
        """
        import torch, torch.distributed as dist
        from colonnade.testing import run_world
        def total(start):
            value = torch.tensor([start + dist.get_rank()])
            dist.all_reduce(value)
            return value.item()
        print(run_world(2, total, 20).values)
        """,
        "-",
    )
    assert done.stdout.strip() == "[41, 41]", done.stderr


@pytest.mark.slow
def test_a_script_runs_its_own_functions(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom colonnade.testing import run_world\n"
        "def rank():\n    return os.environ['RANK']\n"
        "if __name__ == '__main__':\n    print(run_world(2, rank).values)\n"
    )
    done = script_output("", str(script))
    assert done.stdout.strip() == "['0', '1']", done.stderr


@pytest.mark.long
def test_a_script_without_a_guard_is_told_about_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom colonnade.testing import run_world\n"
        "def rank():\n    return os.environ['RANK']\n"
        "print(run_world(2, rank, timeout=20).values)\n"
    )
    done = script_output("", str(script))
    assert done.returncode == 1
    assert "the function was not reached; does the script start its work under `if __name__" in done.stderr


def variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def nccl_sum() -> tuple[float, str]:
    total = torch.full((3,), float(torch.distributed.get_rank() + 1), device="cuda")
    torch.distributed.all_reduce(total)
    return total.sum().item(), str(total.device)


@pytest.fixture
def no_nccl_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NCCL:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_nccl_settings")
def test_ranks_that_share_gpus_get_hosts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    hosts = [[f"colonnade-rank-{rank}", "Socket", "lo", "1"] for rank in range(3)]
    assert run_world(3, variables, *NCCL, backend=None).values == hosts
    without = run_world(3, variables, *NCCL, backend=None, env={"NCCL_NET": None, "NCCL_SOCKET_IFNAME": "eth0"})
    assert without.values == [[f"colonnade-rank-{rank}", None, "eth0", "1"] for rank in range(3)]


@pytest.mark.usefixtures("no_nccl_settings")
@pytest.mark.parametrize("gpus", [0, 2])
def test_nothing_is_set_where_no_gpu_is_shared(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert run_world(2, variables, *NCCL, backend=None).values == [[None] * 4] * 2


def test_nccl_without_a_gpu_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(LaunchError, match="backend='nccl' needs a GPU, but torch finds none"):
        run_world(2, variables, backend="nccl")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nccl_between_four_ranks() -> None:
    gpus = torch.cuda.device_count()
    values = run_world(4, nccl_sum, backend="nccl", timeout=110).values
    assert values == [(30.0, f"cuda:{rank % gpus}") for rank in range(4)]
