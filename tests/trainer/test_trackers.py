"""Trackers: what TensorBoard, Weights & Biases and MLflow have of a run when they are asked afterwards."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.errors import ConfigError
from colonnade.trainer.hooks import LossHook, MLflowHook, TensorBoardHook, WandbHook
from tests.trainer.runs import cut, make_trainer


def train(hook: Any) -> list[float]:
    """Four steps and an evaluation; the losses of the steps."""
    trainer = make_trainer({"clip_grad_norm": 1.0, "NAME": "mine"}, lr=0.1)
    losses: list[float] = []
    hook_of_losses = LossHook()
    hook_of_losses.on_record = lambda trainer, record: losses.append(record.loss)  # type: ignore[method-assign]
    trainer.fit(
        cut(range(16), 16), epochs=1, test_dataloader=cut(range(16), 16), hooks=[LossHook(), hook_of_losses, hook]
    )
    return losses


@pytest.mark.parametrize("hook", [WandbHook("x"), MLflowHook("x"), TensorBoardHook("x")])
def test_one_that_is_not_installed_is_named(hook):
    hook.package = "no_such_package"
    with pytest.raises(ConfigError, match=rf"needs {hook.needs}, which is not installed .* pip install {hook.needs}"):
        hook.after_hook_is_attached(None)


@pytest.mark.long
def test_tensorboard_has_every_second_step_and_the_metrics(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="the extra `long`")
    losses = train(TensorBoardHook(tmp_path, interval=2))
    found = reader.EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in found.Scalars("step/loss")] == [2, 4]
    assert [event.value for event in found.Scalars("step/loss")] == pytest.approx(losses[1::2], rel=1e-6)
    assert {"train/Loss", "test/Loss", "step/grad_norm", "step/time/forward"} <= set(found.Tags()["scalars"])
    (tested,) = found.Scalars("test/Loss")
    assert tested.step == 4
    assert math.isfinite(tested.value)


@pytest.mark.long
def test_wandb_keeps_the_run_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="the extra `long`")
    monkeypatch.setenv("WANDB_SILENT", "true")
    losses = train(WandbHook("mine", name="first", mode="offline", dir=str(tmp_path)))
    wandb.teardown()  # as at the end of a process: its own process has written everything then
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows = wandb_history(log)
    assert [row["step/loss"] for row in rows if "step/loss" in row] == pytest.approx(losses)
    assert any("test/Loss" in row for row in rows)


def wandb_history(log: Path) -> list[dict[str, float]]:
    """The rows of an offline run. Its file is a log as LevelDB has it: blocks of 32 KiB with pieces of records in them."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, rows = log.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no piece begins in the last bytes of a block
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


@pytest.mark.long
def test_mlflow_has_the_config_and_the_metrics_in_a_folder(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="the extra `long`")
    losses = train(MLflowHook("mine", uri=tmp_path / "runs", run_name="first"))
    client = mlflow.MlflowClient((tmp_path / "runs").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.run_name == "first"
    assert run.info.status == "FINISHED"
    assert run.data.params["clip_grad_norm"] == "1.0"
    assert run.data.params["NAME"] == "mine"
    history = sorted(client.get_metric_history(run.info.run_id, "step/loss"), key=lambda one: one.step)
    assert [one.value for one in history] == pytest.approx(losses)
    assert math.isfinite(run.data.metrics["test/Loss"])


class Told:
    """Stands for the package of a tracker and for what it writes to: every call, with what was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **named: Any) -> Told:
            self.calls.append((name, *args, *([named] if named else [])))
            return self

        return call


def hooked(hook: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of a tracker over two steps, an epoch and an evaluation, and a second close."""
    told = Told()
    monkeypatch.setattr(hook, "_import", lambda: told)
    trainer = SimpleNamespace(
        context=SimpleNamespace(get_global_rank=lambda: 0, config={"a": {"b": 1}, "long": "x" * 600}),
        metric_values=lambda kind: {"Loss": {"train": 0.5, "test": 0.25}[kind]},
        cur_step=7,
        cur_epoch=0,
    )
    hook.close()  # nothing is open yet
    hook.before_train(trainer)
    for step in (3, 4):
        hook.on_record(trainer, SimpleNamespace(step=step, epoch=0, numbers=lambda step=step: {"loss": float(step)}))
    hook.after_train_epoch(trainer)
    hook.after_test_epoch(trainer)
    hook.close()
    hook.close()
    hook.on_record(trainer, SimpleNamespace(step=5, epoch=0, numbers=lambda: {"loss": 5.0}))
    hook.after_test_epoch(trainer)
    return told.calls


def test_what_tensorboard_is_told(monkeypatch, tmp_path):
    assert hooked(TensorBoardHook(tmp_path, interval=2), monkeypatch) == [
        ("SummaryWriter", str(tmp_path)),
        ("add_scalar", "step/loss", 4.0, 4),
        ("add_scalar", "train/Loss", 0.5, 7),
        ("add_scalar", "test/Loss", 0.25, 7),
        ("close",),
    ]


def test_what_wandb_is_told(monkeypatch):
    assert hooked(WandbHook("mine", mode="offline"), monkeypatch) == [
        ("init", {"project": "mine", "mode": "offline"}),
        ("log", {"step/loss": 3.0, "step": 3}),
        ("log", {"step/loss": 4.0, "step": 4}),
        ("log", {"train/Loss": 0.5, "step": 7}),
        ("log", {"test/Loss": 0.25, "step": 7}),
        ("finish",),
    ]


def test_what_mlflow_is_told(monkeypatch, tmp_path):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    told = hooked(MLflowHook("mine", uri=tmp_path, interval=3, run_name="first"), monkeypatch)
    assert told == [
        ("set_tracking_uri", tmp_path.as_uri()),
        ("set_experiment", "mine"),
        ("start_run", {"run_name": "first"}),
        ("log_params", {"a.b": "1", "long": "x" * 500}),
        ("log_metrics", {"step/loss": 3.0}, {"step": 3}),
        ("log_metrics", {"train/Loss": 0.5}, {"step": 7}),
        ("log_metrics", {"test/Loss": 0.25}, {"step": 7}),
        ("end_run",),
    ]
    assert os.environ["MLFLOW_ALLOW_FILE_STORE"] == "true"
    for uri in (None, "http://here", "databricks", "sqlite:///a.db"):
        asked = [call for call in hooked(MLflowHook("mine", uri=uri), monkeypatch) if call[0] == "set_tracking_uri"]
        assert asked == ([("set_tracking_uri", uri)] if uri else [])


@pytest.mark.parametrize("hook", [WandbHook("x"), MLflowHook("x"), TensorBoardHook("x")])
def test_rank_0_alone_sends(hook, monkeypatch):
    monkeypatch.setattr(hook, "_import", lambda: pytest.fail("opened on rank 1"))
    trainer: Any = SimpleNamespace(context=SimpleNamespace(get_global_rank=lambda: 1))
    hook.before_train(trainer)
    hook.after_train_epoch(trainer)
    hook.close()
