"""Files that a run writes: what stays of an older one, and the lines themselves, in one process."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.errors import ConfigError
from colonnade.trainer import BaseHook, StepRecord
from colonnade.trainer.hooks import CsvHook, GradientNormHook, JsonlHook, LossHook, log
from tests.trainer.runs import cut, make_trainer


def trainer(step: int = 0, epoch: int = 0, rank: int = 0, epoch_done: bool = False) -> Any:
    return SimpleNamespace(
        context=SimpleNamespace(get_global_rank=lambda: rank),
        cur_step=step,
        cur_epoch=epoch,
        epoch_done=epoch_done,
        metric_values=lambda kind: {"Loss": 0.5 if kind == "train" else float("nan")},
    )


def record(step: int, epoch: int = 0, **values: float) -> StepRecord:
    return StepRecord(step, epoch, 0.25, None, None, 8, 2.0, values=values)


class Spoil(BaseHook):
    """Makes the gradient of the second step NaN, and warns."""

    def before_train_iter(self, trainer):
        weight = trainer.engine.model[0].weight
        if trainer.cur_step == 1:
            trainer.logger.warning("about to spoil")
            self._was = weight.detach().clone()
            weight.data[0, 0] = math.nan
        elif trainer.cur_step == 2:
            weight.data.copy_(self._was)


def lines_of(path: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == kind]


def test_the_log_of_a_run_tells_everything_and_its_page_is_written(tmp_path):
    path = tmp_path / "new" / "deeper" / "log.jsonl"
    trainer = make_trainer({"clip_grad_norm": {"max_norm": 0.01, "report": "layer"}, "NAME": "mine"}, lr=0.1)
    hooks = [LossHook(), GradientNormHook(), Spoil(), JsonlHook(path)]
    trainer.fit(cut(range(16), 16), epochs=1, test_dataloader=cut(range(16), 16), hooks=hooks)
    (begun,) = lines_of(path, "run")
    assert begun["layout"] == {}
    assert begun["made_again"] == 0
    assert begun["clip"] == 0.01
    assert begun["config"]["NAME"] == "mine"
    assert begun["parameters"] == sum(each.numel() for each in trainer.engine.model.parameters())
    steps = lines_of(path, "step")
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [line.get("clipped", 0) for line in steps] == [1, 0, 1, 1]
    assert [line.get("skipped", 0) for line in steps] == [0, 1, 0, 0]
    assert steps[1]["grad_norm"] is None
    assert steps[0]["memory"] > 1
    assert steps[0]["grad_norm/0"] > 0
    for line in steps:
        times = {name: value for name, value in line.items() if name.startswith("time/")}
        assert {"time/data", "time/forward", "time/backward", "time/clip", "time/optimizer"} <= times.keys()
        assert sum(times.values()) == pytest.approx(line["seconds"], rel=0.2, abs=0.01)
    told = [line["text"] for line in lines_of(path, "event")]
    assert told[0] == "about to spoil"
    assert any("step skipped" in text for text in told)
    assert [line["Loss"] for line in lines_of(path, "train")] == [None]  # nothing else can be said of a NaN
    assert [line["Loss"] for line in lines_of(path, "test")] == [trainer.metric_values("test")["Loss"]]
    (end,) = lines_of(path, "end")
    assert (end["how"], end["reason"], end["step"]) == ("finished", "", 4)
    text = path.with_suffix(".html").read_text()
    assert "<b>finished</b>" in text
    assert "clipped (3 of 4)" in text
    assert "skipped (1)" in text
    trainer.context.destroy()


class Breaking(BaseHook):
    """Ends a run in its second step: by a request, an error of a hook, or one of the training pass itself."""

    def __init__(self, how: str) -> None:
        super().__init__(20)
        self.how = how

    def before_train_iter(self, trainer):
        if trainer.cur_step == 1 and self.how == "a pass":
            trainer.engine.model[0].weight = None

    def after_train_iter(self, trainer, output, label, loss):
        if trainer.cur_step == 2 and self.how == "a hook":
            raise ValueError("broken")
        if trainer.cur_step == 2 and self.how == "a request":
            trainer.request_stop("enough")


@pytest.mark.parametrize(("by", "how"), [("a pass", "failed"), ("a hook", "failed"), ("a request", "stopped")])
def test_the_last_line_says_how_a_run_ended(tmp_path, by, how):
    trainer = make_trainer({})
    with pytest.raises(Exception) if how == "failed" else nullcontext():
        trainer.fit(cut(range(16), 16), epochs=1, hooks=[JsonlHook(tmp_path / "log.jsonl"), Breaking(by)])
    *_, end = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert (end["kind"], end["how"], end["reason"]) == ("end", how, "enough" if how == "stopped" else "")
    assert f"<b>{how}</b>" in (tmp_path / "log.html").read_text()
    trainer.context.destroy()


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "world_facts", lambda trainer: {})
    hook = JsonlHook(tmp_path / "run.jsonl")
    hook.before_train(trainer(rank=1))
    hook.on_record(trainer(), record(1))
    hook.close()
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_does_not_fail_the_run(tmp_path, caplog, capfd):
    (tmp_path / "log.html").mkdir()
    trainer = make_trainer({})
    with caplog.at_level("WARNING", logger="colonnade"):
        trainer.fit(cut(range(8), 8), epochs=1, hooks=[JsonlHook(tmp_path / "log.jsonl")])
    told = caplog.text + capfd.readouterr().err  # our logger hands nothing on once it has a handler of its own
    assert "the report of the run was not written: IsADirectoryError" in told
    assert trainer.cur_step == 2
    trainer.context.destroy()


def test_a_run_that_begins_anew_puts_older_files_aside(tmp_path):
    path = tmp_path / "run.csv"
    for text in ("first\n", "second\n"):
        path.write_text(text)
        hook = CsvHook(path)
        hook.before_train(trainer())
        hook.close()
    assert (tmp_path / "run.csv.1").read_text() == "first\n"
    assert (tmp_path / "run.csv.2").read_text() == "second\n"
    assert path.read_text() == "step,epoch,loss,lr,grad_norm,samples,seconds\n"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run.csv", "run.csv.1", "run.csv.2"]


def test_a_resumed_table_goes_on_after_the_steps_that_stay(tmp_path):
    path = tmp_path / "run.csv"
    hook = CsvHook(path, columns=("extra",))
    hook.before_train(trainer())
    for step in (1, 2, 3):
        hook.on_record(trainer(), record(step, extra=step / 2))
    hook.close()
    path.write_text(path.read_text() + "4,0,0.2")  # it was killed in the middle of a line
    hook = CsvHook(path, columns=("extra",))
    hook.before_train(trainer(step=2))
    hook.on_record(trainer(), record(3, epoch=1))
    hook.close()
    assert path.read_text().splitlines() == [
        "step,epoch,loss,lr,grad_norm,samples,seconds,extra",
        "1,0,0.25,,,8,2.0,0.5",
        "2,0,0.25,,,8,2.0,1.0",
        "3,1,0.25,,,8,2.0,",
    ]
    with pytest.raises(ConfigError, match="differ from those of this run"):
        CsvHook(path).before_train(trainer(step=2))


@pytest.mark.parametrize(("epoch_done", "trains"), [(False, [0]), (True, [0, 1])])
def test_of_resumed_lines_those_stay_that_are_not_written_again(tmp_path, epoch_done, trains):
    lines = [{"kind": kind, "step": step, "epoch": step // 2} for step in range(5) for kind in ("step", "event")]
    lines += [{"kind": kind, "step": 9, "epoch": epoch} for kind in ("train", "test") for epoch in range(3)]
    lines += [{"kind": "run", "step": step, "epoch": 0} for step in (0, 4)]
    texts = [json.dumps(line) + "\n" for line in lines] + [
        '"text"\n',
        '{"kind": 1}\n',
        "nothing\n",
        json.dumps(lines[0]),
    ]
    hook = JsonlHook(tmp_path / "run.jsonl")
    left = [json.loads(line) for line in hook.kept(texts, trainer(step=3, epoch=1, epoch_done=epoch_done))]
    assert [line["step"] for line in left if line["kind"] == "step"] == [0, 1, 2, 3]
    assert hook._cut == 2  # the last of them was cut off too
    assert [line["step"] for line in left if line["kind"] == "event"] == [0, 1, 2, 3]
    assert [line["epoch"] for line in left if line["kind"] == "train"] == trains
    assert [line["epoch"] for line in left if line["kind"] == "test"] == [0]
    assert [line["step"] for line in left if line["kind"] == "run"] == [0, 4]


@pytest.mark.parametrize("epoch_done", [True, False])
def test_evaluations_by_step_stay_and_that_at_the_end_of_the_epoch_is_made_again(epoch_done):
    kept = [("train", 2, 0), ("test", 2, 0), ("test", 3, 1), ("test", 4, 1)]
    again = [("test", 5, 1), ("other", 4, 1), ("test", 4, 2)]
    end = [("train", 4, 1), ("test", 4, 1)]
    lines = [
        json.dumps({"kind": kind, "step": step, "epoch": epoch}) + "\n" for kind, step, epoch in [*kept, *again, *end]
    ]
    left = log._behind(lines, trainer(step=4, epoch=1, epoch_done=epoch_done))
    found = [(line["kind"], line["step"], line["epoch"]) for line in map(json.loads, left)]
    assert found == [*kept, *end[:epoch_done]]
