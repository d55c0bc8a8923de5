"""The page "Gradient Clipping": its line of config in a config file, and its command on the example."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.testing import run_world
from tests.seeds.snippets import GRADIENT_CLIPPING as PAGE
from tests.seeds.snippets import blocks

EXAMPLE = Path(__file__).parents[2] / "examples" / "gradient_clipping"
STEP = re.compile(r"step +(\d+)  loss +(\S+)  gradient norm +(\S+) before clipping, (\S+) after")


def _step_with(config: str) -> tuple[float, float]:
    """(the norm before clipping, the length of a step of plain SGD) with a config file of the page's one line."""
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        engine = initialize(model, lambda p: torch.optim.SGD(p, lr=1.0), nn.MSELoss(), context=gpc)[0]
        engine.zero_grad()
        engine.backward(engine.criterion(engine(torch.ones(3, 4) * (10 + gpc.get_global_rank())), torch.zeros(3, 4)))
        engine.step()
        moved = [old - parameter.detach() for old, parameter in zip(before, model.parameters(), strict=True)]
        return engine.grad_norm.item(), torch.cat([part.flatten() for part in moved]).norm().item()


def test_the_one_line_clips_the_whole_gradient_to_1(tmp_path):
    (line,) = blocks(PAGE, "python")
    assert line == "clip_grad_norm = 1.0\n"
    (tmp_path / "config.py").write_text(line)
    for norm, moved in run_world(2, _step_with, str(tmp_path / "config.py")).values:
        assert norm > 2
        assert moved == pytest.approx(1.0, rel=1e-5)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(output of the page's command, run in a copy of the example, and the folder)"""
    folder = tmp_path_factory.mktemp("example") / EXAMPLE.name
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("output", "__pycache__"))
    (command,) = blocks(PAGE, "shell")
    words = shlex.split(command)
    assert words[:6] == ["python", "-m", "torch.distributed.launch", "--nproc_per_node", "1", "--master_addr"]
    with socket.socket() as probe:  # the page's port may be taken on a shared machine; nothing else is changed
        probe.bind(("localhost", 0))
        words[words.index("--master_port") + 1] = str(probe.getsockname()[1])
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=folder, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr, folder


@pytest.mark.slow
def test_the_command_trains_the_example_and_clips_its_bad_batches_to_the_configs_norm(finished):
    output, folder = finished
    config: dict[str, float] = {}
    exec((folder / "config.py").read_text(), config)
    assert config["clip_grad_norm"] == 1.0
    shown = [(int(step), *map(float, rest)) for step, *rest in STEP.findall(output)]
    assert len(shown) > 15
    for step, _, before, after in shown:
        assert after == pytest.approx(min(before, 1.0), abs=2e-4), step
        if step % 17 == 11:
            assert before > 5
    usual = [loss for step, loss, _, _ in shown if step % 17 != 11]
    assert usual[-1] < 0.5 * usual[0]


@pytest.mark.slow
def test_it_names_its_picture_and_every_clipped_step_is_marked_there(finished):
    output, folder = finished
    path = Path(re.search(r"wrote (\S+)", output)[1])
    assert path == folder / "output" / "gradient_norm.svg"
    clipped = int(re.search(r"(\d+) of 120 steps were clipped to 1.0", output)[1])
    picture = ElementTree.parse(path).getroot()
    svg = "{http://www.w3.org/2000/svg}"
    norms, _, marks, _ = (part for part in picture.iter(f"{svg}g") if part.get("class") == "series")
    assert sum(1 for _ in marks.iter(f"{svg}circle")) == clipped >= 7
    (line,) = norms.iter(f"{svg}path")
    points = [tuple(map(float, point)) for point in re.findall(r"([\d.]+) ([\d.]+)", line.get("d"))]
    assert len(points) == 120
    width, height = float(picture.get("width")), float(picture.get("height"))
    assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
