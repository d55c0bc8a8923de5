"""Files that a run writes: what stays of an older one, and the lines themselves, in one process."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.errors import ConfigError
from colonnade.trainer import StepRecord
from colonnade.trainer.hooks import CsvHook, JsonlHook, TensorBoardHook, WandbHook


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


def test_lines_of_steps_epochs_and_evaluations(tmp_path):
    hook = JsonlHook(tmp_path / "new" / "run.jsonl")
    hook.before_train(trainer())
    hook.on_record(trainer(), record(1, extra=3.0))
    assert len(hook.path.read_text().splitlines()) == 1  # at once
    hook.after_train_epoch(trainer(1, 0))
    hook.after_test_epoch(trainer(1, 1))
    hook.close()
    hook.on_record(trainer(), record(2))  # nothing after its end
    assert [json.loads(line) for line in hook.path.read_text().splitlines()] == [
        {"kind": "step", "step": 1, "epoch": 0, "loss": 0.25, "samples": 8, "seconds": 2.0, "extra": 3.0},
        {"kind": "train", "step": 1, "epoch": 0, "Loss": 0.5},
        {"kind": "test", "step": 1, "epoch": 1, "Loss": None},
    ]


def test_other_ranks_write_nothing(tmp_path):
    hook = JsonlHook(tmp_path / "run.jsonl")
    hook.before_train(trainer(rank=1))
    hook.on_record(trainer(), record(1))
    assert not hook.path.exists()


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
    with pytest.raises(ConfigError, match="has other columns"):
        CsvHook(path).before_train(trainer(step=2))


@pytest.mark.parametrize(("epoch_done", "trains"), [(False, [0]), (True, [0, 1])])
def test_of_resumed_lines_those_stay_that_are_not_written_again(tmp_path, epoch_done, trains):
    path = tmp_path / "run.jsonl"
    lines = [{"kind": "step", "step": step, "epoch": step // 2} for step in range(5)]
    lines += [{"kind": kind, "step": 9, "epoch": epoch} for kind in ("train", "test") for epoch in range(3)]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n"text"\n{"kind": 1}\nnothing\n' + json.dumps(lines[0]))
    hook = JsonlHook(path)
    hook.before_train(trainer(step=3, epoch=1, epoch_done=epoch_done))
    hook.close()
    left = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in left if line["kind"] == "step"] == [0, 1, 2, 3]
    assert [line["epoch"] for line in left if line["kind"] == "train"] == trains
    assert [line["epoch"] for line in left if line["kind"] == "test"] == [0]


class Tracker:
    """Stands for a package, what it opens, and what it is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.ended = 0

    def SummaryWriter(self, folder: str) -> Tracker:
        self.sent.append(folder)
        return self

    def init(self, **options: Any) -> Tracker:
        self.sent.append(options)
        return self

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.sent.append((name, value, step))

    def log(self, numbers: dict[str, float]) -> None:
        self.sent.append(numbers)

    def close(self) -> None:
        self.ended += 1

    finish = close


def run(hook: Any, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> Tracker:
    tracker = Tracker()
    monkeypatch.setattr(type(hook), "_import", lambda self: tracker)
    hook.after_hook_is_attached(trainer())
    hook.before_train(trainer(rank=rank))
    for step in (1, 2):
        hook.on_record(trainer(), record(step))
    hook.after_train_epoch(trainer(2))
    hook.after_test_epoch(trainer(2))
    hook.close()
    hook.close()
    return tracker


def test_trackers_get_every_so_many_steps_and_the_metrics(monkeypatch, tmp_path):
    board = run(TensorBoardHook(tmp_path, interval=2), monkeypatch)
    assert board.sent[0] == str(tmp_path)
    assert board.sent[1:5] == [
        ("step/loss", 0.25, 2),
        ("step/samples", 8, 2),
        ("step/seconds", 2.0, 2),
        ("train/Loss", 0.5, 2),
    ]
    assert board.sent[5][::2] == ("test/Loss", 2)
    assert board.ended == 1
    bias = run(WandbHook("mine", name="first"), monkeypatch)
    assert bias.sent[0] == {"project": "mine", "name": "first"}
    assert bias.sent[1] == {"step/loss": 0.25, "step/samples": 8, "step/seconds": 2.0, "step": 1}
    assert len(bias.sent) == 5
    assert bias.ended == 1


def test_a_tracker_runs_on_rank_0_and_one_that_is_not_installed_is_named(monkeypatch, tmp_path):
    assert run(WandbHook("mine"), monkeypatch, rank=1).sent == []
    monkeypatch.undo()
    monkeypatch.setattr(WandbHook, "package", "no_such_package")
    with pytest.raises(ConfigError, match=r"WandbHook needs wandb, which is not installed .* pip install wandb"):
        WandbHook("mine").after_hook_is_attached(trainer())
