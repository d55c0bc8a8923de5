"""Every snippet and command of the page "Gradient Handler", run as printed."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from colonnade import compat
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.registry import GRADIENT_HANDLER
from colonnade.testing import run_world
from tests.seeds.snippets import GRADIENT_HANDLER as PAGE
from tests.seeds.snippets import OWN_PARALLELISM, blocks

EXAMPLE = Path(__file__).parents[2] / "examples" / "gradient_handler"
ROOTS = pytest.mark.parametrize("root", ["colossalai", "colonnade"])

PAGES = {
    # page: (block with the class, block with the config, name of the class)
    PAGE: (0, 1, "MyGradientHandler"),
    OWN_PARALLELISM: (4, 5, "YourGradientHandler"),
}


def _train_with(page: str, root: str, folder: str) -> tuple[int, list[str]]:
    """Define the handler, write the config file, launch, and take two steps on this rank."""
    compat.install()
    calls = []
    handler, config, name = PAGES[page]
    code = blocks(page, "python", root)
    exec(code[handler], {"__name__": "users_file", "do_something": lambda: calls.append(1)})
    path = Path(folder) / f"config_{torch.distributed.get_rank()}.py"
    path.write_text(code[config])
    try:
        with launch(path, context=ParallelContext(), verbose=False) as gpc:
            engine = initialize(nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1), nn.MSELoss(), context=gpc)[0]
            attached = [type(entry).__name__ for entry in engine.gradient_handlers]
            probed = len(calls)
            for _ in range(2):
                engine.zero_grad()
                engine.backward(engine.criterion(engine(torch.ones(3, 2)), torch.ones(3, 1)))
                engine.step()
            return len(calls) - probed, attached
    finally:
        GRADIENT_HANDLER.remove(name)


@ROOTS
@pytest.mark.parametrize("page", PAGES)
def test_the_handler_is_registered_configured_built_and_called_each_step(page, root, tmp_path):
    for calls, attached in run_world(2, _train_with, page, root, str(tmp_path)).values:
        assert calls == 2
        assert PAGES[page][2] in attached
        # It reduces nothing, so data parallelism is still ours: no DistributedDataParallel, no missing sum.
        assert "DataParallelGradientHandler" in attached


@pytest.mark.slow
def test_the_start_command_trains_the_example_on_four_processes():
    (command,) = blocks(PAGE, "shell")
    words = shlex.split(command)
    assert words[:6] == ["python", "-m", "torch.distributed.launch", "--nproc_per_node", "4", "--master_addr"]
    with socket.socket() as probe:  # the page's port may be taken on a shared machine; nothing else is changed
        probe.bind(("localhost", 0))
        words[words.index("--master_port") + 1] = str(probe.getsockname()[1])
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=EXAMPLE, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "replicas on 4 ranks are equal: True" in done.stderr
    losses = [float(line.rsplit(" ", 1)[1]) for line in done.stderr.splitlines() if "loss on rank 0" in line]
    assert losses[-1] < 0.6 * losses[0]
