"""What doctor says of this machine, and of one that is not well."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from colonnade.cli import doctor
from colonnade.cli.doctor import CHECKS, DoctorFinding
from tests.cli import ROOT, colonnade, command, environment


def test_it_looks_for_every_package_that_the_wheel_needs() -> None:
    needed = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert needed is not None
    names = re.findall(r'^  "(\w+)[^;"]*",$', needed[1], re.MULTILINE)
    assert {"torch", *doctor._REQUIRED} == set(names)


@pytest.mark.slow
def test_this_machine_is_well() -> None:
    done = colonnade("doctor", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert answer["ok"] is True
    by_name = {check["name"]: check for check in answer["checks"]}
    assert list(by_name) == list(CHECKS)
    assert all(check["status"] in ("ok", "warn") for check in by_name.values())
    assert by_name["two ranks"]["status"] == "ok"
    assert "all-reduce correct" in by_name["two ranks"]["detail"]


@pytest.mark.slow
@pytest.mark.long
def test_lines_name_what_is_wrong_and_the_next_step_and_a_bad_one_is_exit_1() -> None:
    env = {**environment(), "WORLD_SIZE": "4", "GLOO_SOCKET_IFNAME": "no-such-interface"}
    done = subprocess.run(
        command("doctor"), cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert any(line.split()[:2] == ["warn", "environment"] for line in lines)
    assert any("-> unset WORLD_SIZE" in line for line in lines)
    assert any(line.split()[:3] == ["bad", "two", "ranks"] for line in lines)


def test_stale_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in doctor._RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert doctor.check_environment().status == "ok"
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert "NCCL_DEBUG" in doctor.check_environment().next_step
    monkeypatch.setenv("MASTER_PORT", "1")
    assert doctor.check_environment().next_step == "unset MASTER_PORT"


@pytest.mark.parametrize(
    ("constant", "value", "check"),
    [
        ("colonnade._launch.LEAST_TORCH", (99, 0), "torch"),
        ("_LEAST_MEMORY", 1 << 60, "memory"),
        ("_LEAST_SHM", 1 << 60, "shared memory"),
        ("_LEAST_FILES", 1 << 60, "limits"),
        ("_REQUIRED", ("no-such-package",), "packages"),
    ],
)
def test_each_bar_can_be_missed(monkeypatch: pytest.MonkeyPatch, constant: str, value: Any, check: str) -> None:
    assert CHECKS[check]().status == "ok"
    monkeypatch.setattr(constant if "." in constant else f"{doctor.__name__}.{constant}", value)
    finding = CHECKS[check]()
    assert finding.status in ("warn", "bad")
    assert finding.next_step


def test_the_cheap_checks_are_ok_here() -> None:
    for name in ("python", "devices", "gloo", "cores", "port"):
        assert CHECKS[name]().status == "ok", name


def test_the_last_line_says_what_to_do_next() -> None:
    fine = {"a": DoctorFinding("ok", "")}
    assert doctor.next_step(fine).startswith("Next: `colonnade demo`")
    assert "Check the warnings (b)" in doctor.next_step({**fine, "b": DoctorFinding("warn", "", "look")})
    assert "fix the items marked bad (c)" in doctor.next_step({**fine, "c": DoctorFinding("bad", "", "fix")})


@pytest.mark.parametrize(("address", "status"), [("127.0.1.1", "warn"), ("10.0.0.7", "ok")])
def test_a_host_name_on_the_loopback_interface_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, address: str, status: str
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("socket.gethostbyname", lambda name: address)
    finding = doctor.check_hostname()
    assert finding.status == status
    assert address in finding.detail
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # gloo then announces the address of that interface
    assert doctor.check_hostname().status == "ok"


def test_whatever_is_found_has_a_next_step() -> None:
    tree = ast.parse(Path(doctor.__file__).read_text())
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "DoctorFinding"
    ]
    found = [call for call in calls if getattr(call.args[0], "value", "ok") != "ok"]
    assert len(found) > 10
    assert all(len(call.args) == 3 or isinstance(call.args[1], ast.Starred) for call in found)
