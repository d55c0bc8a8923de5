"""The average of weights under every layout beside one process; evaluations by step; profiles."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.checkpoint import export_full
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.errors import ConfigError
from colonnade.testing import run_world
from colonnade.trainer import BaseHook, Trainer
from colonnade.trainer.hooks import (
    EarlyStopHook,
    EMAHook,
    EvaluateHook,
    JsonlHook,
    LoadCheckpointHook,
    LossHook,
    ProfilerHook,
    SaveCheckpointHook,
)
from colonnade.utils import get_dataloader
from tests.trainer.runs import PIPELINE, cut, dataset, make_trainer, model, samples

DECAY, STEPS = 0.8, 6
LATE = {"zero": {"stage": 1, "gather_ahead": True, "bucket_mb": 1e-4}, "sync": {"shared_memory": False}}
SGD = partial(torch.optim.SGD, momentum=0.9)


class Weights(BaseHook):
    """Every step's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Tensor]] = []

    def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
        self.seen.append({name: value.clone() for name, value in trainer.engine.model.state_dict().items()})


def train(config: dict[str, Any], folder: Path, steps: int) -> None:
    """Steps on the same 8 rows, whatever the layout."""
    trainer = make_trainer(config, lr=0.5, optimizer=SGD)
    loader = get_dataloader(dataset(64), batch_size=8 // trainer.context.data_parallel_size, context=trainer.context)
    hooks = [LoadCheckpointHook(folder), EMAHook(DECAY, warm_up=False), SaveCheckpointHook(2, folder, by_epoch=False)]
    trainer.fit(loader, max_steps=steps, hooks=hooks)


def truth() -> dict[str, Tensor]:
    """The average by its definition, over the weights that one process had."""
    trainer = make_trainer({}, lr=0.5, optimizer=SGD)
    average = {name: value.clone() for name, value in trainer.engine.model.state_dict().items()}
    weights = Weights()
    trainer.fit(get_dataloader(dataset(64), batch_size=8, context=trainer.context), max_steps=STEPS, hooks=[weights])
    for after in weights.seen:
        average = {name: DECAY * mean + (1 - DECAY) * after[name] for name, mean in average.items()}
    trainer.context.destroy()
    return average


@pytest.fixture(scope="module")
def one_process() -> dict[str, Tensor]:
    return truth()


def averaged(folder: Path) -> dict[str, Tensor]:
    return load_file(export_full(folder / "ema", folder / "ema.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({}, PIPELINE),
        (LATE, {"zero": 3}),
        pytest.param({"zero": 3}, {"zero": 3}, marks=pytest.mark.long),
        pytest.param(PIPELINE, {"zero": 3}, marks=pytest.mark.long),
    ],
    ids=["data, then pipeline", "late gathers, then zero 3", "zero 3", "pipeline, then zero 3"],
)
def test_the_average_is_that_of_one_process_and_goes_on_in_another_layout(tmp_path, one_process, first, then):
    run_world(2, train, first, tmp_path, 4)
    run_world(2, train, then, tmp_path, STEPS)
    found = averaged(tmp_path)
    assert set(found) == set(one_process)
    for name, expected in one_process.items():
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-12)


def half(folder: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Of a half-precision model: the average of a run, and what a run that goes on takes up of it."""
    kept = []
    for steps in (3, 4):
        gpc = launch({}, context=ParallelContext(), verbose=False)
        built = model().bfloat16()
        engine, *_ = initialize(built, SGD(built.parameters(), lr=0.5), nn.functional.cross_entropy, context=gpc)
        hook = EMAHook(0.9)
        if kept:
            hook.interval = 100  # it stays as it was loaded
        batches = [(x.bfloat16(), y) for x, y in cut(range(24), 24)]
        hooks = [LoadCheckpointHook(folder), hook, SaveCheckpointHook(1, folder, by_epoch=False)]
        Trainer(engine).fit(batches, max_steps=steps, hooks=hooks)
        assert {each.dtype for each in built.parameters()} == {torch.bfloat16}
        kept.append([mean.clone() for mean in hook._average])
        gpc.destroy()
    return kept[0], kept[1]


def test_an_evaluation_sees_the_average_and_the_weights_come_back():
    trainer = make_trainer({}, lr=0.5, optimizer=SGD)
    batches, hook = cut(range(24), 24), EMAHook(0.9)

    def loss() -> float:
        return nn.functional.cross_entropy(trainer.engine.model(samples(24)[0]), samples(24)[1]).item()

    trainer.fit(batches, max_steps=5, hooks=[LossHook(), hook])
    own = loss()
    with hook.swapped():
        average = loss()
    assert abs(own - average) > 1e-4
    assert trainer.evaluate(batches)["Loss"] == pytest.approx(average, rel=1e-9)
    assert loss() == own
    with pytest.raises(RuntimeError):  # rows of another width
        trainer.evaluate([*batches, (torch.ones(2, 1, dtype=torch.float64), torch.zeros(2, dtype=torch.long))])
    assert loss() == own
    hook.evaluate = False
    assert trainer.evaluate(batches)["Loss"] == pytest.approx(own, rel=1e-9)
    trainer.context.destroy()


def by_steps(folder: Path) -> tuple[list[tuple[int, float]], list[tuple[int, float]], int]:
    """Evaluations every 2 steps; a run in two parts has the lines of one in one."""
    lines = []
    for name, parts in (("whole", [12]), ("parts", [5, 12])):
        for end in parts:
            trainer = make_trainer({}, lr=0.1, optimizer=SGD)
            hooks = [
                LoadCheckpointHook(folder / name),
                LossHook(),
                EvaluateHook(cut(range(24), 24), 2),
                JsonlHook(folder / f"{name}.jsonl"),
                SaveCheckpointHook(100, folder / name, by_epoch=False),
            ]
            trainer.fit(cut(range(32), 32), max_steps=end, hooks=hooks)
            trainer.context.destroy()
        found = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        lines.append([(line["step"], line["Loss"]) for line in found if line["kind"] == "test"])
    stopped = make_trainer({}, lr=0.0)
    stopped.fit(
        cut(range(32), 32), epochs=9, hooks=[LossHook(), EvaluateHook(cut(range(24), 24), 2), EarlyStopHook(patience=1)]
    )
    stopped.context.destroy()
    return lines[0], lines[1], stopped.cur_step


def test_evaluations_by_step_are_written_once_and_an_early_stop_counts_them(tmp_path):
    whole, parts, stopped = by_steps(tmp_path)
    assert [step for step, _ in whole] == [2, 4, 6, 8, 10, 12]
    assert parts == whole
    assert stopped == 7  # better at 2, no better at 4 and 6; the next step is the last


def test_a_decay_is_from_0_to_below_1():
    for decay in (0, 0.5, 0.9999):
        assert EMAHook(decay).decay == decay
    for decay in (1, 1.5, -0.001, float("nan")):
        with pytest.raises(ConfigError) as error:
            EMAHook(decay)
        assert str(error.value).startswith(
            f"EMAHook got decay={decay!r}; it must be at least 0 and less than 1, such as 0.999"
        )


def test_what_they_refuse():
    with pytest.raises(ConfigError, match=r"interval is .*; it must be an int >= 1"):
        EvaluateHook([], 0)
    for steps, skip in ((0, 0), (-1, 0), (1, -1)):
        with pytest.raises(ConfigError, match=f"^ProfilerHook got steps={steps} and skip={skip}; steps must be an int"):
            ProfilerHook("trace", steps, skip)


def test_the_average_of_half_precision_weights_is_saved_unrounded(tmp_path):
    first, then = half(tmp_path)
    assert first[0].dtype == torch.float32
    assert not torch.equal(first[0], first[0].bfloat16().float())
    assert all(torch.equal(one, other) for one, other in zip(first, then, strict=True))
