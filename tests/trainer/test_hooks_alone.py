"""Hooks in one process, with a trainer of numbers: signals, traces, averages, facts of a run."""

from __future__ import annotations

import json
import math
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
from torch.utils.data import DataLoader

from colonnade.errors import CheckpointError, ConfigError
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
    checkpoint_hooks,
    log,
    profiler,
)
from colonnade.trainer.hooks.hook import BaseHook, HookList, checked_interval
from tests.engine.test_engine import world_of_one
from tests.trainer.runs import cut, dataset, make_trainer
from tests.trainer.test_look import Managed
from tests.trainer.test_writers import record
from tests.trainer.test_writers import trainer as writing


@pytest.mark.parametrize("wrong", [0, -1, True, 1.0, "1", None])
def test_what_is_no_interval(wrong):
    with pytest.raises(ConfigError, match=r"^interval must be an int >= 1 \(epochs or steps\), not "):
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
    assert [text.partition(":")[0] for text in told] == [
        "StopOnSignal needs the main thread, where Python delivers signals; call fit in the main thread [C092]"
    ]


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
    meet = profiler._clocks
    monkeypatch.setattr(profiler, "_clocks", lambda trainer, times: met.append(times) or meet(trainer, times))
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
        moments = profiler._clocks(SimpleNamespace(context=context), 3)  # type: ignore[arg-type]
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
    hook._swap_in()
    hook.close()
    assert weight.item() == 3.0
    with EMAHook().swapped():  # of no run yet
        pass


class Loaded(Managed):
    """A checkpoint in which the weight is 7."""

    def load(self, model: Any, step: int) -> None:
        self.done.append(("load", step))
        with torch.no_grad():
            model[0].fill_(7.0)


def test_an_average_is_saved_and_loaded_in_the_place_of_the_weights(monkeypatch, tmp_path):
    made: list[Any] = []
    monkeypatch.setattr(
        checkpoint_hooks, "CheckpointManager", lambda *given, **named: made.append(Loaded(*given, **named)) or made[-1]
    )
    hook, trainer, weight = averaged()
    assert (hook.state_dict(), made) == ({"updates": 0}, [])
    trainer.hooks, trainer.context, trainer.cur_step = [SaveCheckpointHook(1, tmp_path, keep=5)], "world", 4
    hook.before_train(trainer)
    manager = made[0]
    assert (manager.given, manager.named) == ((tmp_path / "ema", "world", 5, False), {})
    hook.updates = 3
    assert hook.state_dict() == {"updates": 3}
    assert manager.done == [("save", 4, trainer.engine.model)]
    hook.load_state_dict({"updates": 9})
    assert (hook.updates, len(made)) == (3, 1)  # there is nothing to load from
    trainer.hooks = [LoadCheckpointHook(tmp_path / "old")]
    hook.load_state_dict({"updates": 9})
    assert (made[1].given, made[1].named) == ((tmp_path / "old" / "ema", "world"), {"read_only": True})
    assert made[1].done[0] == ("load", 4)
    assert (hook.updates, hook._average[0].item(), weight.item()) == (9, 7.0, 1.0)
    hook.after_train(trainer)
    assert manager.done[-1] == "close"
    hook.after_train(trainer)
    hook.close()
    assert len(manager.done) == 2
    hook._manager = manager
    hook.close()
    assert (manager.done[-1], hook._manager) == (("exit", CheckpointError), None)


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


def test_a_checkpoint_is_saved_once_a_step_and_at_the_end(monkeypatch, tmp_path):
    made: list[Any] = []
    monkeypatch.setattr(checkpoint_hooks, "CheckpointManager", lambda *given: made.append(Managed(*given)) or made[-1])
    engine = SimpleNamespace(model="model", optimizer="optimizer")
    trainer: Any = SimpleNamespace(engine=engine, cur_step=2, context="world", failed=False, state_dict=lambda: "state")
    hook = SaveCheckpointHook(1, tmp_path, keep=4, background=True)
    hook._save(trainer)  # before it has begun
    hook.before_train(trainer)
    (manager,) = made
    assert manager.given == (tmp_path, "world", 4, True)
    hook._save(trainer)  # that step is there already
    assert manager.done == []
    trainer.cur_step = 3
    hook._save(trainer)
    hook._save(trainer)
    saved = [("save", 3, "model", "optimizer", "state")]
    assert manager.done == saved
    trainer.cur_step = 4
    hook.after_train(trainer)
    assert manager.done == [*saved, ("save", 4, "model", "optimizer", "state"), "close"]
    hook.after_train(trainer)
    hook.close()
    assert len(manager.done) == 3
    hook._manager, trainer.failed, trainer.cur_step = manager, True, 5
    hook.after_train(trainer)
    assert manager.done[3:] == ["close"]
    hook._manager = manager
    hook.close()
    assert manager.done[4:] == [("exit", CheckpointError)]
    other = SaveCheckpointHook(1, tmp_path, model="mine")  # type: ignore[arg-type]
    other._manager = manager
    other._save(trainer)
    assert manager.done[-1] == ("save", 5, "mine", "optimizer", "state")


@pytest.mark.parametrize(
    ("rank", "steps", "first_has", "required", "step", "is_loaded"),
    [
        (0, [3], True, False, None, True),
        (0, [], False, False, None, False),
        (0, None, False, False, None, False),
        (0, [], False, True, None, True),
        (0, [], False, False, 3, True),
        (1, [], True, False, None, True),  # rank 0 says
        (1, [3], False, False, None, False),
    ],
)
def test_a_run_goes_on_where_rank_0_sees_a_checkpoint_or_must(
    monkeypatch, tmp_path, rank, steps, first_has, required, step, is_loaded
):
    folder = tmp_path / "run"
    if steps is not None:
        folder.mkdir()
    made: list[Any] = []
    asked: list[bool] = []

    class Found(Managed):
        def steps(self) -> list[int]:
            assert rank == 0
            assert steps is not None
            return steps

    def gather(mine: bool, context: Any) -> list[bool]:
        asked.append(mine)
        return [mine, not mine] if rank == 0 else [first_has, mine]

    monkeypatch.setattr(
        checkpoint_hooks, "CheckpointManager", lambda *given, **named: made.append(Found(*given, **named)) or made[-1]
    )
    monkeypatch.setattr(checkpoint_hooks, "gather_from_all", gather)
    loaded: list[Any] = []
    trainer: Any = SimpleNamespace(
        context=SimpleNamespace(get_global_rank=lambda: rank),
        logger=SimpleNamespace(info=lambda text: None),
        load_state=lambda *given: loaded.append(given),
    )
    LoadCheckpointHook(folder, step, required, model="mine").before_train(trainer)  # type: ignore[arg-type]
    assert made[0].named == {"read_only": True}
    assert loaded == ([(made[0], "mine", step)] if is_loaded else [])
    assert asked == [bool(steps) and rank == 0]


# -- lists ------------------------------------------------------------------------------------------------


class Heard(BaseHook):
    def __init__(self, name: str, fails: bool = False) -> None:
        super().__init__()
        self.name, self.fails, self.told = name, fails, list[Any]()

    def before_train(self, trainer: Any) -> None:
        self.told.append("before_train")
        if self.fails:
            raise ValueError(self.name)

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise ValueError("no state")
        return {"name": self.name} if self.name else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.told.append(state)
        if self.fails:
            raise ValueError("not this state")

    def close(self) -> None:
        self.told.append("close")
        if self.fails:
            raise ValueError("open")


def test_the_first_error_is_held_and_the_hook_that_raised_is_not_called_again():
    hooks = [Heard("one", True), Heard("two"), Heard("three", True)]
    listed = HookList(SimpleNamespace(cur_epoch=1, cur_step=2), hooks)
    assert {point: len(calls) for point, calls in listed._calls.items() if calls} == {"before_train": 3}
    for _ in range(2):
        listed.call("before_train")
    assert [hook.told for hook in hooks] == [["before_train"], ["before_train"] * 2, ["before_train"]]
    assert str(listed.pending).startswith("hook Heard failed in before_train (epoch 1, step 2): ValueError: one")
    listed.close()
    assert [hook.told[-1] for hook in hooks] == ["close"] * 3


def test_states_of_hooks_are_kept_by_name_and_what_fails_is_held():
    trainer = SimpleNamespace(cur_epoch=0, cur_step=0)
    listed = HookList(trainer, [Heard("one"), Heard(""), Heard("three")])
    states = listed.state_dict()
    assert states == {"Heard": {"name": "one"}, "Heard 3": {"name": "three"}}
    listed.load_state_dict(states)
    assert [hook.told for hook in listed.hooks] == [[{"name": "one"}], [], [{"name": "three"}]]  # type: ignore[attr-defined]
    assert listed.pending is None
    for use, told in (
        (HookList.state_dict, "state_dict"),
        (lambda each: each.load_state_dict(states), "load_state_dict"),
    ):
        failing = HookList(trainer, [Heard("one", True)])
        use(failing)
        assert f"hook Heard failed in {told}" in str(failing.pending)


def test_what_a_hook_is_by_itself():
    hook, trainer = BaseHook(), SimpleNamespace(states={})
    assert hook.state_dict() == {}
    hook.init_runner_states(trainer, "mine", 1)  # type: ignore[arg-type]
    hook.init_runner_states(trainer, "mine", 2)  # type: ignore[arg-type]
    assert trainer.states == {"mine": 1}


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
        monkeypatch.setattr(log.time, "monotonic", lambda now=now: now)
        hook._file, here.step_done = file, is_done  # type: ignore[assignment]
        hook.after_train_iter(here, None, None, None)  # type: ignore[arg-type]
    assert logged == [10.0, 11.5]


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


def test_the_facts_of_a_run_are_plain_values():
    held = SimpleNamespace(
        **{
            kind: SimpleNamespace(formula=given)
            for kind, given in (("parameters", 8), ("gradients", None), ("state", 0))
        }
    )
    axes = [SimpleNamespace(name=name, size=size) for name, size in (("data", 1), ("tensor", 2), ("pipeline", 3))]
    context = SimpleNamespace(
        device=torch.device("cpu"),
        world_size=6,
        layout=SimpleNamespace(axes=axes),
        config={"clip_grad_norm": 2, "x": math.inf},
    )
    engine = SimpleNamespace(
        memory=lambda: held,
        schedule=None,
        accumulation=4,
        model=nn.Linear(2, 3),
        ledger=lambda: SimpleNamespace(by_pattern=list),
        precision_table=lambda: {"computed with": SimpleNamespace(dtypes=("bfloat16",))},
    )
    facts = log.run_facts(SimpleNamespace(engine=engine, context=context))  # type: ignore[arg-type]
    assert facts["layout"] == {"tensor": 2, "pipeline": 3}
    assert facts["dtype"] == "bfloat16"
    assert facts["memory"] == {"parameters": 8, "gradients": 0, "state": 0}
    assert (facts["parameters"], facts["clip"], facts["accumulation"], facts["world_size"]) == (9, 2.0, 4, 6)
    assert facts["config"] == {"clip_grad_norm": 2, "x": "Infinity"}
    assert json.loads(json.dumps(facts)) == facts


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


def trained(folder: Path, parts: list[dict[str, int]]) -> tuple[list[torch.Tensor], list[float | None]]:
    """A run in parts, with dropout and batches in random order: its weights, and the best losses of an early stop."""
    best = []
    for limits in parts:
        trainer = make_trainer({}, lr=0.1, dropout=0.3)
        stop = EarlyStopHook(on="train", patience=50)
        hooks = [LoadCheckpointHook(folder), LossHook(), stop, SaveCheckpointHook(100, folder)]
        trainer.fit(DataLoader(dataset(16), batch_size=4, shuffle=True), hooks=hooks, **limits)
        weights = [each.detach().clone() for each in trainer.engine.model.parameters()]
        best.append(stop.best)
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
