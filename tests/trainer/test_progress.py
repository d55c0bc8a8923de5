"""Progress: plain lines where there is no terminal, a bar where there is one, the right loss on rank 0."""

from __future__ import annotations

import io
import os
import re
from types import SimpleNamespace
from typing import Any

import pytest
from torch.nn import functional as F

from colonnade.testing import run_world
from colonnade.trainer import StepRecord
from colonnade.trainer.hooks import ProgressHook
from tests.trainer.runs import PIPELINE, cut, make_trainer, model, samples


def shown(config: dict[str, Any], count: int, epochs: int) -> None:
    trainer = make_trainer({**config, "clip_grad_norm": 1.0})
    trainer.fit(cut(range(count), count), epochs=epochs, display_progress=True)


def test_plain_lines_are_about_ten_an_epoch():
    lines = run_world(1, shown, {}, 4 * 43, 2).stdout[0].splitlines()
    assert 20 <= len(lines) <= 24
    assert lines[0].startswith("epoch 1/2  step  4/86  loss ")
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


def drawn_at(width: int) -> list[str]:
    """The lines of a bar over numbers of every length."""
    screen = Terminal()
    trainer: Any = SimpleNamespace(
        context=SimpleNamespace(get_global_rank=lambda: 0),
        max_epochs=3,
        total_steps=1200,
        steps_per_epoch=400,
        cur_step=0,
    )
    os.environ["COLUMNS"] = str(width)
    hook = ProgressHook(screen)
    hook.before_train(trainer)
    for step, (loss, norm) in enumerate([(2.5, 0.1), (1.234e-5, 1e4), (1000.0, 3.0)], 1):
        hook._last = -100.0
        hook.on_record(trainer, StepRecord(400 * step, step - 1, loss, 3e-4 / step**5, norm, 8, 0.1))
    hook.close()
    return [
        line.rstrip()
        for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).splitlines()
        if "loss" in line
    ]


@pytest.mark.parametrize(
    ("width", "words"), [(80, ["loss", "norm", "left"]), (140, ["loss", "lr", "norm", "samples/s", "left"])]
)
def test_the_bar_keeps_its_width(monkeypatch, width, words):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = drawn_at(width)
    assert len(lines) >= 3
    assert len({len(re.findall("[━╸╺]", line)) for line in lines}) == 1
    assert len(re.findall("[━╸╺]", lines[0])) >= 9
    for line in lines:
        assert len(line) <= width
        assert [word for word in ("loss", "lr", "norm", "samples/s", "left") if word in line] == words
