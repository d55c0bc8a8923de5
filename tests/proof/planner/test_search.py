"""Search: what fits, in which order, why the rest was cut, and what to do with the first."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from colonnade.config import load_config
from colonnade.proof.planner.hardware import load_hardware
from colonnade.proof.planner.plan import plan
from colonnade.proof.planner.search import search
from colonnade.proof.report.plan_tables import layout_text
from tests.cli import colonnade as command
from tests.cli import environment
from tests.proof.planner.jobs import JOBS

MACHINE = replace(load_hardware("h100"), memory=15_000_000)  # of which the smallest layouts need more


@pytest.fixture(scope="module")
def found() -> Any:
    return search(load_config(dict(clip_grad_norm=1.0)), 4, MACHINE, JOBS["gpt"], "tests.proof.planner.jobs:gpt")


@pytest.mark.slow
def test_what_fits_is_sorted_and_the_rest_says_why(found: Any) -> None:
    times = [one.step_seconds for one in found.fitting]
    assert times == sorted(times)
    assert all(one.peak_memory <= MACHINE.memory and not one.reason for one in found.fitting)
    assert all(one.reason for one in found.cut)
    plain = {"data": 4, "tensor": 1, "pipeline": 1, "zero": 0, "checkpoint": "none"}
    (large,) = [one for one in found.cut if plain.items() <= one.layout.items()]
    assert large.reason == "the fullest rank does not fit"
    texts = [layout_text(one.layout) for one in (*found.fitting, *found.cut)]
    assert {"data 4", "data 4, zero 1"} <= {*texts}
    assert len({*texts}) == len(texts)


@pytest.mark.slow
def test_the_first_is_a_config_that_takes_what_was_said(found: Any) -> None:
    values: dict[str, Any] = {}
    exec(found.config, values)
    values.pop("__builtins__")
    assert values["clip_grad_norm"] == 1.0
    again = plan(load_config(values), 4, MACHINE, JOBS["gpt"])
    assert again.totals.step_seconds == pytest.approx(found.fitting[0].step_seconds)
    assert again.totals.peak_memory == found.fitting[0].peak_memory


@pytest.mark.slow
def test_where_nothing_fits_it_is_said(tmp_path: Path) -> None:
    machine = (Path(__file__).parents[3] / "colonnade/proof/planner/hardware_files/h100.toml").read_text()
    (tmp_path / "tiny.toml").write_text(machine.replace("memory = 75_000_000_000", "memory = 1000"))
    words = ["--model", "tests.proof.planner.jobs:gpt", "--hardware", "tiny.toml", "--search", "--html", "page.html"]
    done = command("plan", "--world-size", 2, *words, cwd=tmp_path)  # a config is not needed
    assert done.returncode == 1
    assert "0 layouts fit" in done.stdout
    assert "parameters, gradients and optimizer state exceed" in done.stdout
    assert "no layout fits" in (tmp_path / "page.html").read_text()
    done = command("plan", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "--search without a config needs --world-size" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_commands_for_the_small_twin_prove_it(found: Any, tmp_path: Path) -> None:
    twin = found.verify.replace("colonnade verify", "python -m colonnade.cli verify")
    env = {**environment(), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-ec", twin], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
