"""Hooks in runs of one process: signals, traces, averages, checkpoints, files, facts of a run."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from colonnade.errors import ConfigError, HookError
from colonnade.trainer import Trainer
from colonnade.trainer.hooks import (
    CsvHook,
    EarlyStopHook,
    EMAHook,
    JsonlHook,
    LoadCheckpointHook,
    LossHook,
    ProfilerHook,
    SaveCheckpointHook,
    StopOnSignal,
    log,
    progress,
)
from colonnade.trainer.hooks.hook import BaseHook, checked_interval
from tests.trainer.runs import cut, dataset, make_trainer
from tests.trainer.test_loop import Events, fitted
from tests.trainer.test_writers import record
from tests.trainer.test_writers import trainer as writing


@pytest.mark.parametrize("wrong", [0, -1, True, 1.0, "1", None])
def test_what_is_no_interval(wrong):
    with pytest.raises(ConfigError, match=r"^interval is .*; it must be an int >= 1, a number of epochs or steps"):
        checked_interval(wrong)
    assert [checked_interval(each) for each in (1, 2)] == [1, 2]


# -- signals ----------------------------------------------------------------------------------------------


def stopped() -> Any:
    told: list[tuple[str, bool]] = []
    return SimpleNamespace(
        told=told,
        context=SimpleNamespace(get_global_rank=lambda: 3),
        request_stop=lambda reason, leave: told.append((reason, leave)),
    )


def test_a_signal_asks_to_stop_and_one_that_comes_later_is_as_before(monkeypatch):
    heard: list[int] = []
    before = {
        number: signal.signal(number, lambda got, _: heard.append(got)) for number in (signal.SIGUSR1, signal.SIGUSR2)
    }
    try:
        ours = {number: signal.getsignal(number) for number in before}
        trainer, hook = stopped(), StopOnSignal((signal.SIGUSR1, signal.SIGUSR2))
        hook.before_train(trainer)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert trainer.told == [("SIGUSR1 on rank 3", True)]
        # A launcher sends on what the scheduler has sent to all processes: the second signal is the same request.
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (len(trainer.told), heard) == (1, [])
        monkeypatch.setattr(progress, "_SECONDS_OF_ONE_REQUEST", 0.0)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (len(trainer.told), heard) == (1, [signal.SIGUSR1])
        assert signal.getsignal(signal.SIGUSR1) is ours[signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR2) is not ours[signal.SIGUSR2]
        hook.close()
        assert {number: signal.getsignal(number) for number in before} == ours
        hook._note(signal.SIGUSR2, None)  # one that came while it was closed
        assert len(trainer.told) == 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert StopOnSignal()._signals == (signal.SIGTERM,)


# -- traces -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "skip", "traced"), [(2, 1, 2), (1, 0, 1), (9, 4, 2)])
def test_a_trace_has_the_steps_that_were_asked_for_and_the_clock_of_its_rank(tmp_path, steps, skip, traced):
    """Of six steps of two passes each."""
    fitted(6, {"gradient_accumulation": 2}, epochs=2, hooks=[ProfilerHook(tmp_path / "new", steps, skip)])
    (file,) = (tmp_path / "new").glob("*.json")
    trace = json.loads(file.read_text())
    passed = [event for event in trace["traceEvents"] if event["name"] == f"{ENGINE}: AddmmBackward0"]
    assert len(passed) == 2 * 2 * traced  # of two layers
    assert (trace["colonnade"]["rank"], len(trace["colonnade"]["met_us"])) == (0, 9)
    assert trace["colonnade"]["met_us"][0] == pytest.approx(time.time() * 1e6, abs=60e6)


ENGINE = "autograd::engine::evaluate_function"


def test_a_run_that_is_too_short_for_its_trace_is_told(tmp_path, caplog, capfd):
    for skip in (2, 3):
        fitted(hooks=[ProfilerHook(tmp_path / "trace", skip=skip)], epochs=1)
    told = caplog.text + capfd.readouterr().err
    assert "wrote no trace, because the run had only 2 steps and the hook skips the first 3" in told
    assert "the hook skips the first 2" not in told


# -- averages ---------------------------------------------------------------------------------------------


def averaged(**options: Any) -> tuple[EMAHook, Any, nn.Parameter]:
    """An average of one weight that begins at 1; the second parameter does not learn."""
    model = nn.ParameterList([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1), requires_grad=False)])
    waited: list[str] = []
    engine = SimpleNamespace(model=model, wait_for_weights=lambda: waited.append("waited"))
    trainer: Any = SimpleNamespace(engine=engine, hooks=[], step_done=True, cur_step=0, waited=waited)
    hook = EMAHook(**options)
    hook.before_train(trainer)
    return hook, trainer, model[0]


def test_an_average_by_its_definition_with_and_without_warm_up():
    for warm_up in (True, False):
        hook, trainer, weight = averaged(decay=0.5, warm_up=warm_up)
        expected = 1.0
        for updates in range(12):
            trainer.cur_step += 1
            weight.data.fill_(float(updates))
            hook.after_train_iter(trainer, None, None, None)
            decay = min(0.5, (1 + updates) / (10 + updates)) if warm_up else 0.5
            expected = decay * expected + (1 - decay) * updates
            assert hook._average[0].item() == pytest.approx(expected, rel=1e-6)
            assert (hook.updates, len(trainer.waited)) == (updates + 1, updates + 1)
        assert len(hook._average) == 1


def test_an_average_counts_every_so_many_steps_and_goes_on_in_a_second_run():
    hook, trainer, weight = averaged(decay=0.5, interval=2, warm_up=False)
    for step, is_done in ((1, True), (2, False), (2, True), (3, True)):
        weight.data.fill_(3.0)
        trainer.cur_step, trainer.step_done = step, is_done
        hook.after_train_iter(trainer, None, None, None)
    assert hook.updates == 1
    assert hook._average[0].item() == 2.0
    assert weight.item() == 3.0  # it is beside the weights
    hook.before_train(trainer)
    assert hook._average[0].item() == 2.0


def test_only_narrow_weights_are_replaced_while_an_average_is_saved():
    hook, trainer, wide = averaged()
    narrow = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    trainer.engine.model.append(narrow)
    special = nn.Parameter(torch.ones(1, dtype=torch.bfloat16).as_subclass(type("Mine", (torch.Tensor,), {})))
    trainer.engine.model.append(special)
    hook._average = []
    hook.before_train(trainer)
    for mean in hook._average:
        mean.fill_(1.001)
    memory = wide.data_ptr()
    with hook._unrounded():
        assert (wide.data_ptr(), wide.item()) == (memory, pytest.approx(1.001))
        assert (narrow.dtype, narrow.item()) == (torch.float32, pytest.approx(1.001))
        assert special.dtype == torch.bfloat16
    assert (wide.item(), narrow.item(), narrow.dtype) == (1.0, 1.0, torch.bfloat16)


# -- checkpoints ------------------------------------------------------------------------------------------


def saved_steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in sorted(folder.glob("step-*"))]


@pytest.mark.parametrize(
    ("by_epoch", "interval", "expected"),
    [
        (True, 1, [2, 4, 6, 8]),
        (True, 2, [4, 8]),
        (True, 3, [6, 8]),
        (False, 1, [1, 2, 3, 4, 5, 6, 7, 8]),
        (False, 3, [3, 6, 8]),
    ],
)
def test_a_checkpoint_is_saved_at_every_interval_and_once_at_the_end(tmp_path, by_epoch, interval, expected):
    fitted(epochs=4, hooks=[SaveCheckpointHook(interval, tmp_path, by_epoch=by_epoch, keep=9)])
    assert saved_steps(tmp_path) == expected


def test_a_run_that_fails_saves_nothing_more(tmp_path):
    def fail(trainer: Trainer) -> None:
        raise ZeroDivisionError

    with pytest.raises(HookError, match="ZeroDivisionError"):
        fitted(epochs=2, hooks=[SaveCheckpointHook(1, tmp_path), Events({("after_train_iter", 1, 3): fail})])
    assert saved_steps(tmp_path) == [2]


def test_a_run_without_a_checkpoint_begins_anew_unless_one_is_required(tmp_path):
    folder = tmp_path / "none"
    assert fitted(max_steps=1, hooks=[LoadCheckpointHook(folder)]).cur_step == 1
    for asked in ({"required": True}, {"step": 3}):
        with pytest.raises(HookError, match="no checkpoint"):
            fitted(max_steps=1, hooks=[LoadCheckpointHook(folder, **asked)])


# -- files ------------------------------------------------------------------------------------------------


def test_lines_are_on_disk_at_once_and_files_are_closed(tmp_path):
    hook = CsvHook(tmp_path / "run.csv")
    hook.before_train(writing())
    hook.on_record(writing(), record(1))
    assert (tmp_path / "run.csv").read_text().splitlines()[1:] == ["1,0,0.25,,,8,2.0"]
    file = hook._file
    assert file is not None
    hook.close()
    assert file.closed
    hook.write("nowhere")
    assert hook._file is None


def test_a_table_that_was_cut_off_before_its_first_line_has_one_again(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text("")
    hook = CsvHook(path)
    hook.before_train(writing(step=2))
    hook.close()
    assert path.read_text() == "step,epoch,loss,lr,grad_norm,samples,seconds\n"


@pytest.mark.parametrize(("rank", "report", "pages"), [(0, True, 1), (0, False, 0), (1, True, 0)])
def test_the_page_of_a_run_is_written_by_who_wrote_the_file_and_is_asked_to(tmp_path, monkeypatch, rank, report, pages):
    import logging

    for name in ("run_facts", "world_facts"):
        monkeypatch.setattr(log, name, lambda trainer: {})
    hook = JsonlHook(tmp_path / "run.jsonl", report=report)
    written: list[Path] = []
    monkeypatch.setattr("colonnade.proof.report.write_run_page", lambda logs, page: written.append(page))
    hook.before_train(writing(rank=rank))
    handlers = logging.getLogger("colonnade").handlers
    assert (hook._warnings in handlers) is (rank == 0)
    hook.close()
    assert hook._warnings not in handlers
    assert written == [tmp_path / "run.html"] * pages


# -- facts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "level"),
    [
        (None, None),
        (1, 1.0),
        (0.5, 0.5),
        (0, None),
        (-1.0, None),
        (float("inf"), None),
        ({"max_norm": 2.0}, 2.0),
        ({"max_norm": 2.0, "method": "zclip"}, None),
        ({"method": "zclip"}, None),
        ("auto", None),
    ],
)
def test_the_level_of_clipping_is_known_where_there_is_one(setting, level):
    assert log._clip_level(setting) == level


def test_configs_by_dotted_names():
    assert log.flat_config({"a": 1, "b": {"c": {"d": 2}, "e": 3}}) == {"a": 1, "b.c.d": 2, "b.e": 3}


# -- whole runs -------------------------------------------------------------------------------------------


class Closes(BaseHook):
    def __init__(self) -> None:
        super().__init__()
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_hooks_are_closed_at_the_end_of_a_fit_or_when_others_take_their_place():
    trainer, batches = make_trainer({}), cut(range(8), 8)
    assert (trainer.stopping, trainer.failed, trainer.step_done, trainer.epoch_done) == (False,) * 4
    assert (trainer._wants_exit, trainer.returns_output, trainer.is_fitting) == (False, True, False)
    first, second = Closes(), Closes()
    assert trainer.evaluate(batches, [first]) == {}
    assert first.closed == 0
    assert set(trainer.evaluate(batches)) == set()  # with those of before
    assert trainer.hooks == [first]
    trainer.fit(batches, epochs=1, hooks=[second])
    assert (first.closed, second.closed) == (1, 1)
    assert (trainer.is_fitting, trainer.context.waits.clock) == (False, None)
    assert set(trainer.evaluate(batches, hooks=[])) == set()
    assert trainer.metric_values("train") == {}
    with pytest.raises(ConfigError, match="Trainer needs the engine"):
        Trainer(None)  # type: ignore[arg-type]
    assert set(Trainer(trainer.engine).evaluate(batches)) == {"Loss"}  # without any, the loss
    logger: Any = SimpleNamespace()
    assert Trainer(trainer.engine, logger=logger).logger is logger
    trainer.context.destroy()


def trained(folder: Path, parts: list[dict[str, int]]) -> tuple[list[torch.Tensor], list[list[float | None]]]:
    """A run in parts, with dropout and batches in random order: its weights, and the best losses of an early stop."""
    best = []
    for limits in parts:
        trainer = make_trainer({}, lr=0.1, dropout=0.3)
        stops = [EarlyStopHook(on="train", patience=50, mode=mode) for mode in ("min", "max")]
        hooks = [LoadCheckpointHook(folder), LossHook(), *stops, SaveCheckpointHook(100, folder)]
        trainer.fit(DataLoader(dataset(16), batch_size=4, shuffle=True), hooks=hooks, **limits)
        weights = [each.detach().clone() for each in trainer.engine.model.parameters()]
        best.append([stop.best for stop in stops])
        trainer.context.destroy()
    return weights, best


@pytest.mark.parametrize(
    "parts", [[{"epochs": 1}, {"epochs": 3}], [{"max_steps": 6}, {"epochs": 3}], [{"max_steps": 8}, {"epochs": 3}]]
)
def test_a_run_in_parts_is_the_whole_one_to_the_bit(tmp_path, parts):
    whole, (best,) = trained(tmp_path / "whole", [{"epochs": 3}])
    found, (_, then) = trained(tmp_path / "parts", parts)
    assert all(torch.equal(one, other) for one, other in zip(whole, found, strict=True))
    assert then == best
    assert best[0] < best[1]  # two hooks of one class have a state each
