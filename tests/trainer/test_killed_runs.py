"""A rank is killed at some step, again and again; the run that comes back is the undisturbed one, to the bit."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import colonnade
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.nn.lr_scheduler import CosineAnnealingLR
from colonnade.testing import run_world
from colonnade.trainer import Trainer, hooks
from colonnade.utils import get_dataloader
from tests.cli import colonnade as command_line

STEPS, SAVE_EVERY = 24, 4


class KillAt(hooks.BaseHook):
    """Kills this process with SIGKILL before a step."""

    def __init__(self, step: int) -> None:
        super().__init__(priority=50)
        self._step = step

    def before_train_iter(self, trainer: Trainer) -> None:
        if trainer.cur_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(parallel: dict[str, int], folder: Path, kill: tuple[int, int] | None) -> list[str]:
    """Dropout, AdamW, LR schedule, shuffling, clipping; digests of what must be equal in the end."""
    config = {"parallel": parallel, "clip_grad_norm": 0.05, "num_microbatches": 2, "seed": 11}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        torch.manual_seed(5)
        layers = [nn.Linear(24, 24), nn.Dropout(0.3), nn.Tanh(), nn.Linear(24, 24), nn.Dropout(0.2), nn.Linear(24, 3)]
        model: Any = nn.Sequential(*layers)
        model = colonnade.split(model, at=["3"]) if "pipeline" in parallel else model
        engine = colonnade.initialize(
            model, lambda p: torch.optim.AdamW(p, lr=0.02), nn.CrossEntropyLoss(), context=gpc, verbose=False
        )[0]
        data = TensorDataset(torch.randn(70, 24), torch.randint(0, 3, (70,)))
        loader = get_dataloader(data, shuffle=True, batch_size=4, drop_last=True, context=gpc)
        killing = [KillAt(kill[1])] if kill is not None and kill[0] == gpc.get_global_rank() else []
        Trainer(engine).fit(
            loader,
            max_steps=STEPS,
            hooks=[
                hooks.LoadCheckpointHook(folder),
                hooks.LossHook(),
                hooks.LRSchedulerHook(CosineAnnealingLR(engine.optimizer, STEPS, warmup_steps=4), by_epoch=False),
                hooks.SaveCheckpointHook(SAVE_EVERY, folder, save_by_iter=True, background=True),
                *killing,
            ],
        )
        found = [
            digest(engine.model.state_dict()),
            digest(engine.optimizer.state_dict()),
            digest(gpc.streams.state_dict()),
            digest(torch.get_rng_state()),
        ]
        engine.close()
        return found


def digest(value: Any) -> str:
    """Of every bit in a nested value."""
    whole = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            whole.update(item.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(item, dict):
            for key in sorted(item, key=str):
                whole.update(str(key).encode())
                add(item[key])
        elif isinstance(item, (list, tuple)):
            for part in item:
                add(part)
        else:
            whole.update(repr(item).encode())

    add(value)
    return whole.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "parallel"), [(2, {"data": 2}), (4, {"data": 2, "pipeline": 2})], ids=["2 ranks", "4 ranks"]
)
def test_ten_kills_at_random_steps_change_no_bit(tmp_path, world, parallel):
    undisturbed = run_world(world, train, parallel, tmp_path / "undisturbed", None).values
    chance = random.Random(world)
    for number in range(10):
        # Later each time, so that no run is past the step at which it is to be killed.
        rank, step = chance.randrange(world), 2 * number + chance.randrange(3)
        result = run_world(world, train, parallel, tmp_path / "killed", (rank, step), check=False)
        assert result.outcomes[rank].signal == "SIGKILL", result.report()
    assert run_world(world, train, parallel, tmp_path / "killed", None).values == undisturbed


SCRIPT = """
import json, os, sys
from pathlib import Path
from tests.trainer.test_killed_runs import train

kill = {"0": (1, 7), "1": (0, 13)}.get(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("found", json.dumps(train({"data": 2}, Path(sys.argv[1]), kill)))
"""


@pytest.mark.slow
def test_a_run_that_is_started_again_by_the_launcher_ends_as_the_undisturbed_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = command_line("run", "-n", 2, "--max-restarts", 2, script, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line.partition("found ")[2]) for line in done.stdout.splitlines() if "found " in line]
    assert sorted(found) == sorted(run_world(2, train, {"data": 2}, tmp_path / "undisturbed", None).values)
    assert sum("restart " in line for line in done.stderr.splitlines()) == 2
