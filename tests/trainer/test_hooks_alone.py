"""Hooks in one process, with a trainer of numbers: signals, traces, averages, facts of a run."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colonnade.errors import ConfigError
from colonnade.trainer.hooks import (
    CsvHook,
    EMAHook,
    JsonlHook,
    ProfilerHook,
    StopOnSignal,
    profiler,
    run_facts,
    writers,
)
from colonnade.trainer.hooks.base import checked_interval
from tests.engine.test_engine import world_of_one
from tests.trainer.test_writers import record
from tests.trainer.test_writers import trainer as writing


@pytest.mark.parametrize("wrong", [0, -1, True, 1.0, "1", None])
def test_what_is_no_interval(wrong):
    with pytest.raises(ConfigError, match=r"^interval is a whole number of epochs or steps from 1 on, not "):
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


def test_a_signal_asks_to_stop_and_the_second_is_as_before():
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
        assert heard == []
        assert signal.getsignal(signal.SIGUSR1) is ours[signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR2) is not ours[signal.SIGUSR2]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (len(trainer.told), heard) == (1, [signal.SIGUSR1])
        hook.close()
        assert {number: signal.getsignal(number) for number in before} == ours
        hook._note(signal.SIGUSR2, None)  # one that came while it was closed
        assert len(trainer.told) == 1
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert StopOnSignal()._signals == (signal.SIGTERM,)


def test_signals_come_to_the_main_thread_only():
    told: list[str] = []

    def attempt() -> None:
        try:
            StopOnSignal((signal.SIGUSR1,)).before_train(stopped())
        except ConfigError as error:
            told.append(str(error))

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert [text.partition(":")[0] for text in told] == ["StopOnSignal works in the main thread only"]


# -- traces -----------------------------------------------------------------------------------------------


class Profile:
    """Stands for torch.profiler.profile."""

    made: list[Any] = []

    def __init__(self, **options: Any) -> None:
        self.options, self.told = options, list[str]()
        self.made.append(self)

    def start(self) -> None:
        self.told.append("start")

    def stop(self) -> None:
        self.told.append("stop")

    def export_chrome_trace(self, path: str) -> None:
        self.told.append("export")
        Path(path).write_text('{"traceEvents": []}')


@pytest.mark.parametrize(("device", "memory"), [("cpu", False), ("cuda", True)])
def test_a_trace_is_begun_ended_and_written_with_the_clock_of_its_rank(monkeypatch, tmp_path, device, memory):
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(Profile, "made", [])
    met: list[int] = []
    meet = profiler._meet
    monkeypatch.setattr(profiler, "_meet", lambda trainer, times: met.append(times) or meet(trainer, times))
    with world_of_one() as gpc:
        context = SimpleNamespace(
            device=torch.device(device),
            layout=gpc.layout,
            get_global_rank=lambda: 0,
            is_launched=True,
            world_size=1,
        )
        trainer: Any = SimpleNamespace(context=context, logger=SimpleNamespace(info=lambda text: None), step_done=True)
        for folder in (tmp_path / "new" / "trace", tmp_path):  # one that is not there, and one that is
            hook = ProfilerHook(folder, steps=1, skip=0, memory=memory)
            hook.before_train(trainer)
            hook.after_train_iter(trainer, None, None, None)
            (profile,) = Profile.made
            Profile.made.clear()
            assert profile.told == ["start", "stop", "export"]
            kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            assert profile.options == {"activities": kinds[: 1 + (device == "cuda")], "profile_memory": memory}
            (file,) = folder.glob("*.json")
            trace = json.loads(file.read_text())
            assert trace["traceEvents"] == []
            assert trace["colonnade"]["rank"] == 0
            assert len(trace["colonnade"]["met_us"]) == 9
            assert trace["colonnade"]["met_us"][0] == pytest.approx(time.time() * 1e6, abs=60e6)
    assert met == [9, 1] * 2


def test_ranks_meet_where_there_are_several(monkeypatch):
    met: list[Any] = []
    monkeypatch.setattr(dist, "barrier", lambda group: met.append(group))
    for size, expected in ((1, []), (2, ["world"] * 3)):
        context = SimpleNamespace(is_launched=True, world_size=size, get_group=lambda mode: "world")
        moments = profiler._meet(SimpleNamespace(context=context), 3)  # type: ignore[arg-type]
        assert met == expected
        assert len(moments) == 3


def test_a_trace_that_an_error_cuts_off_is_stopped_and_one_that_the_run_ends_is_written(monkeypatch):
    warned: list[str] = []
    trainer: Any = SimpleNamespace(logger=SimpleNamespace(warning=warned.append), step_done=True)
    ended: list[Any] = []
    for seen, profile in ((0, None), (1, None), (2, None), (3, Profile())):
        hook = ProfilerHook("trace", skip=2)
        monkeypatch.setattr(hook, "_end", ended.append)
        hook._seen, hook._profile = seen, profile
        hook.after_train(trainer)
    assert len(warned) == 2  # of the first two the run was too short
    assert ended == [trainer]
    hook.close()
    assert (hook._profile, profile.told) == (None, ["stop"])  # type: ignore[union-attr]
    hook.close()
    assert ProfilerHook("trace")._seen == 0


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


@pytest.mark.parametrize(("evaluate", "updates", "seen"), [(True, 1, 2.0), (False, 1, 3.0), (True, 0, 3.0)])
def test_evaluations_see_the_average_and_the_weights_come_back(evaluate, updates, seen):
    hook, trainer, weight = averaged(evaluate=evaluate)
    hook.updates = updates
    weight.data.fill_(3.0)
    hook._average[0].fill_(2.0)
    hook.before_test(trainer)
    assert weight.item() == seen
    assert len(trainer.waited) == (seen == 2.0)
    hook.before_test(trainer)  # a second time changes nothing
    hook.after_test(trainer)
    assert weight.item() == 3.0
    hook.after_test(trainer)
    with suppress(ZeroDivisionError), hook.swapped():
        assert weight.item() == 2.0
        raise ZeroDivisionError
    assert weight.item() == 3.0
    hook._put_in()
    hook.close()
    assert weight.item() == 3.0
    with EMAHook().swapped():  # of no run yet
        pass


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


def test_memory_is_measured_once_in_a_while(tmp_path, monkeypatch):
    hook = JsonlHook(tmp_path / "run.jsonl")
    logged: list[float] = []
    here = SimpleNamespace(
        step_done=True, context=SimpleNamespace(device=torch.device("cpu")), log=lambda values: logged.append(now)
    )
    for file, is_done, now in (
        (None, True, 10.0),
        ("open", False, 10.0),
        ("open", True, 10.0),
        ("open", True, 10.5),
        ("open", True, 11.0),
        ("open", True, 11.5),
    ):
        monkeypatch.setattr(writers.time, "monotonic", lambda now=now: now)
        hook._file, here.step_done = file, is_done  # type: ignore[assignment]
        hook.after_train_iter(here, None, None, None)  # type: ignore[arg-type]
    assert logged == [10.0, 11.5]


@pytest.mark.parametrize(("rank", "report", "pages"), [(0, True, 1), (0, False, 0), (1, True, 0)])
def test_the_page_of_a_run_is_written_by_who_wrote_the_file_and_is_asked_to(tmp_path, monkeypatch, rank, report, pages):
    import logging

    monkeypatch.setattr(writers, "run_facts", lambda trainer: {})
    hook = JsonlHook(tmp_path / "run.jsonl", report=report)
    written: list[int] = []
    monkeypatch.setattr(hook, "_write_report", lambda: written.append(1))
    hook.before_train(writing(rank=rank))
    handlers = logging.getLogger("colonnade").handlers
    assert (hook._warnings in handlers) is (rank == 0)
    hook.close()
    assert hook._warnings not in handlers
    assert len(written) == pages


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
    assert run_facts._clip_level(setting) == level


def test_configs_by_dotted_names_and_devices_by_theirs(monkeypatch):
    assert run_facts.flat_config({"a": 1, "b": {"c": {"d": 2}, "e": 3}}) == {"a": 1, "b.c.d": 2, "b.e": 3}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"name of {device}")
    assert run_facts._device_name(torch.device("cpu")) == "cpu"
    assert run_facts._device_name(torch.device("cuda:1")) == "name of cuda:1"
