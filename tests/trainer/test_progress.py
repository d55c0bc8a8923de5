"""Progress: plain lines where there is no terminal, a bar where there is one, the right loss on rank 0."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from torch.nn import functional as F

from colonnade.testing import run_world
from colonnade.trainer.hooks import ProgressHook
from tests.trainer.runs import PIPELINE, cut, make_trainer, model, samples


def shown(config: dict[str, Any], count: int, epochs: int) -> None:
    trainer = make_trainer({**config, "clip_grad_norm": 1.0})
    trainer.fit(cut(range(count), count), epochs=epochs, display_progress=True)


def test_plain_lines_are_about_ten_an_epoch():
    lines = run_world(1, shown, {}, 4 * 43, 2).stdout[0].splitlines()
    assert 20 <= len(lines) <= 24
    assert lines[0].startswith("epoch 1/2  step 4/86  loss ")
    assert lines[-1].startswith("epoch 2/2  step 86/86")
    for part in ("lr 0", "norm ", "samples/s", "left 0:00:00"):
        assert part in lines[-1]


def test_rank_0_of_a_pipeline_shows_the_loss_that_the_last_stage_has():
    x, y = samples(4)
    schedule = {**PIPELINE, "schedule": {**PIPELINE["schedule"], "loss_everywhere": False}}
    for config in (PIPELINE, schedule):
        world = run_world(2, shown, config, 4, 1)
        found = re.search(r"loss ([0-9.]+)", world.stdout[0])
        assert found is not None
        assert float(found[1]) == pytest.approx(F.cross_entropy(model()(x), y).item(), rel=1e-3)
        assert world.stdout[1] == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def bar() -> str:
    trainer = make_trainer({})
    screen = Terminal()
    trainer.fit(cut(range(40), 40), epochs=1, hooks=[ProgressHook(screen)])
    return screen.getvalue()


def test_a_terminal_gets_a_bar():
    drawn = run_world(1, bar).values[0]
    assert "━" in drawn
    assert "step 10/10" in drawn
    assert "loss" in drawn
