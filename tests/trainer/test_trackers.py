"""Trackers: what TensorBoard, Weights & Biases and MLflow have of a run when they are asked afterwards."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
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
