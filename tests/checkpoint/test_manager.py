"""The manager's own rules: what it keeps, what it refuses, and that every rank hears of it."""

from __future__ import annotations

import os
import shutil
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from colonnade._launch import launch
from colonnade.checkpoint import CheckpointManager, save, storage
from colonnade.checkpoint.save import save_checks
from colonnade.checkpoint.storage import check_space
from colonnade.constants import SAVED
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import CheckpointError
from colonnade.optim.clip import ZClip
from colonnade.parallel.placement import Shard, place
from colonnade.testing import run_world
from tests.checkpoint.models import WAYS, launched


@pytest.fixture
def manager(tmp_path):
    with CheckpointManager(tmp_path, ParallelContext(), keep=2) as manager:
        yield manager


def names(manager: CheckpointManager) -> list[str]:
    return sorted(path.name for path in manager.folder.iterdir() if path.name != "run.lock")


def test_the_newest_steps_are_kept(manager):
    for step in (0, 5, 30, 200):
        manager.save(step, nn.Linear(1, 1))
    assert names(manager) == ["step-00000030", "step-00000200"]
    assert (manager.steps(), manager.latest()) == ([30, 200], 200)


def test_a_step_that_is_saved_again_replaces_the_first(manager, caplog):
    model = nn.Linear(1, 1)
    for value in (1.0, 2.0, 3.0):
        nn.init.constant_(model.weight, value)
        manager.save(1, model)
    assert names(manager) == ["step-00000001.r2"]
    assert "was saved, but" not in caplog.text
    assert manager.steps() == [1]
    nn.init.zeros_(model.weight)
    assert manager.load(model).step == 1
    assert model.weight.item() == 3.0


def test_a_step_older_than_those_there_is_kept_and_said(manager, caplog):
    for step in (10, 20, 5):
        manager.save(step, nn.Linear(1, 1))
    assert manager.steps() == [5, 20]
    assert "step 5 was saved, but" in caplog.text
    assert "later steps 10, 20" in caplog.text


def test_latest_looks_past_what_is_broken(manager):
    for step in (1, 2):
        manager.save(step, nn.Linear(1, 1))
    os.truncate(manager.folder / "step-00000002/rank-00000.safetensors", 3)
    assert (manager.steps(), manager.latest()) == ([1, 2], 1)


@pytest.mark.parametrize("step", [-1, 1.5, "3", True, None])
def test_a_step_is_a_whole_number(manager, step):
    with pytest.raises(CheckpointError, match="pass a whole number, 0 or larger"):
        manager.save(step, nn.Linear(1, 1))


@pytest.mark.parametrize("keep", [0, -1, 1.5, "3", True])
def test_keep_is_a_whole_number(tmp_path, keep):
    with pytest.raises(CheckpointError, match="pass the number of checkpoints to keep"):
        CheckpointManager(tmp_path, ParallelContext(), keep=keep)


def test_a_model_or_optimizer_that_cannot_be_saved_is_named(manager):
    complex_model = nn.Module()
    complex_model.weight = nn.Parameter(torch.zeros(1, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match=r"weight has dtype torch\.complex128"):
        manager.save(1, complex_model)
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"parameter of shape \(1, 1\) that is not in the model"):
        manager.save(1, model, torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.state[model.weight]["odd"] = {1, 2}
    with pytest.raises(CheckpointError, match=r"the optimizer's odd of weight is a builtins\.set"):
        manager.save(1, model, optimizer)
    optimizer.state[model.weight]["odd"] = [torch.zeros(1)]
    with pytest.raises(CheckpointError, match="the optimizer's odd of weight is a list of tensors"):
        manager.save(1, model, optimizer)
    model.register_state_dict_post_hook(_drop_bias)
    with pytest.raises(CheckpointError, match=r"does not contain the parameters bias"):
        manager.save(1, model)


def _drop_bias(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    del state["bias"]


def test_a_folder_that_cannot_be_written_to_is_said_at_once(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file/run", Path("/proc/run")):
        with pytest.raises(CheckpointError, match="checkpoints cannot be written to"):
            CheckpointManager(folder, ParallelContext())


def test_too_little_space_is_said_before_anything_is_written(manager, monkeypatch):
    with pytest.raises(CheckpointError, match=r"1,000,000,000,000\.0 MB are needed, [\d,.]+ MB are free"):
        check_space(manager.folder, 10**18)
    manager.save(1, nn.Linear(1, 1))
    usage = shutil.disk_usage(manager.folder)._replace(free=40_000_000)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        CheckpointError, match=r"no space for the checkpoint in .*: 65\.\d MB are needed, 40\.0 MB are free"
    ):
        manager.save(2, nn.Linear(4000, 4000))
    assert names(manager) == ["step-00000001"]


def test_read_only_loads_and_does_not_save(manager):
    manager.save(1, nn.Linear(1, 1))
    with CheckpointManager(manager.folder, ParallelContext(), read_only=True) as reader:
        assert reader.load(nn.Linear(1, 1)).step == 1
        with pytest.raises(CheckpointError, match="this manager is read-only"):
            reader.save(2, nn.Linear(1, 1))


def test_what_watches_a_model_may_refuse_that_it_is_saved(manager):
    class Watch:
        asked, allows = 0, True

        def look(self) -> None:
            self.asked += 1
            if not self.allows:
                raise CheckpointError("not now")

    watch, model = Watch(), nn.Linear(1, 1)
    save_checks[model] = weakref.WeakMethod(watch.look)
    manager.save(1, model)
    watch.allows = False
    with pytest.raises(CheckpointError, match="not now"):
        manager.save(2, model)
    assert (watch.asked, manager.steps()) == (2, [1])
    del watch
    manager.save(2, model)
    assert manager.steps() == [1, 2]


@pytest.mark.parametrize("writing", [None, False, True])
def test_after_an_error_inside_the_folder_is_given_back_once_nothing_is_written(tmp_path, monkeypatch, writing):
    go = threading.Event()
    monkeypatch.setattr(storage, "hook", lambda point: go.wait(20) if writing and point == "tensor written" else None)
    manager = CheckpointManager(tmp_path, ParallelContext(), background=writing is not None)
    if writing is not None:
        manager.save(1, nn.Linear(1, 1))
    while not writing and manager._pending is not None and manager._pending.is_writing:
        time.sleep(0.01)
    with pytest.raises(ValueError, match="the user's own"), manager:
        raise ValueError("the user's own")
    if writing:
        with pytest.raises(CheckpointError, match="already has a CheckpointManager"):
            CheckpointManager(tmp_path, ParallelContext())
        go.set()
        manager.close()
    CheckpointManager(tmp_path, ParallelContext()).close()


@pytest.mark.parametrize("call", ["save", "load", "wait", "close", "leave"])
def test_every_next_call_waits_for_a_save_in_the_background_and_raises_its_error(tmp_path, monkeypatch, call):
    def fail(point: str) -> None:
        if point == "tensor written":
            time.sleep(0.1)
            raise OSError("late")

    manager, model = CheckpointManager(tmp_path, ParallelContext(), background=True), nn.Linear(1, 1)
    monkeypatch.setattr(storage, "hook", fail)
    manager.save(1, model)
    calls = {
        "save": lambda: manager.save(2, model),
        "load": lambda: manager.load(model),
        "wait": manager.wait,
        "close": manager.close,
        "leave": lambda: manager.__exit__(None, None, None),
    }
    with pytest.raises(CheckpointError, match="saving step 1 in the background: OSError: late"):
        calls[call]()
    assert names(manager) == []
    if call not in ("close", "leave"):
        manager.close()
    CheckpointManager(tmp_path, ParallelContext()).close()  # the folder is given back


def test_ranks_of_a_world_say_in_which_call_they_wait(tmp_path, monkeypatch):
    places = set()
    with launch({}, context=ParallelContext(), verbose=False) as context:
        monkeypatch.setattr(storage, "hook", lambda point: places.add(context.waits._place[0]))
        with CheckpointManager(tmp_path, context) as manager:
            manager.save(1, nn.Linear(1, 1))
    assert "outside the engine, in CheckpointManager.save()" in places


def test_the_launcher_is_told_what_a_run_would_go_on_from(manager, monkeypatch):
    file = manager.folder / "told"
    for path in (file, manager.folder / "not there/told"):  # a launcher that is gone does no harm
        monkeypatch.setenv(SAVED, str(path))
        manager.save(3, nn.Linear(1, 1))
    folder = manager.folder / "step-00000003"
    assert file.read_text() == (
        f"step 3 in {folder}; a loop that calls CheckpointManager.load() on that folder resumes from it"
    )
    monkeypatch.delenv(SAVED)
    manager.save(4, nn.Linear(1, 1))
    assert "step 4" not in file.read_text()


SCHEDULERS: dict[str, Any] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 7),
    "milestones": lambda optimizer: MultiStepLR(optimizer, [2, 4, 4]),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.5, total_steps=20),
    "chain": lambda optimizer: SequentialLR(
        optimizer, [CosineAnnealingLR(optimizer, 3), MultiStepLR(optimizer, [2])], milestones=[3]
    ),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=1),
}


def _rates(scheduler: Any, optimizer: Any, steps: int) -> list[float]:
    rates = []
    for step in range(steps):
        optimizer.step()
        scheduler.step(*([step % 3] if isinstance(scheduler, ReduceLROnPlateau) else []))
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_scalers_and_clip_methods_go_on_where_they_were(manager, name):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler, scaler, clip = SCHEDULERS[name](optimizer), torch.amp.GradScaler("cpu"), ZClip()
    _rates(scheduler, optimizer, 4)
    scaler._scale, clip_state = torch.tensor(32.0), {key: value + 3 for key, value in clip.state_dict().items()}
    clip.load_state_dict(clip_state)
    manager.save(1, model, optimizer, {"scheduler": scheduler, "scaler": scaler, "clip": clip})
    expected = _rates(scheduler, optimizer, 5)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler, scaler, clip = SCHEDULERS[name](optimizer), torch.amp.GradScaler("cpu"), ZClip()
    manager.load(model, optimizer, {"scheduler": scheduler, "scaler": scaler, "clip": clip})
    assert _rates(scheduler, optimizer, 5) == expected
    assert scaler.get_scale() == 32.0
    assert {key: value.tolist() for key, value in clip.state_dict().items()} == {
        key: value.tolist() for key, value in clip_state.items()
    }


# -- every rank -------------------------------------------------------------------------------------------


class Broken:
    def state_dict(self) -> dict[str, int]:
        raise ValueError("out of order")

    def load_state_dict(self, state: Any) -> None:
        raise ValueError("out of order")


def meet_errors(folder: Path) -> list[str]:
    """Each of these goes wrong on one rank only, or because the ranks differ; all of them must hear of it."""
    tensor = ParallelMode.TENSOR
    with launched(WAYS["tensor 2 x pipeline 2"]) as context, CheckpointManager(folder, context) as manager:
        rank = context.get_global_rank()
        stage, at = context.get_local_rank(ParallelMode.PIPELINE), context.get_local_rank(tensor)
        plain = nn.Linear(2, 2) if stage == 0 else nn.Sequential(nn.Linear(2, 2))
        uneven = nn.Module()
        uneven.weight = place(nn.Parameter(torch.ones(2 + at)), {tensor: Shard(0)}, shape=(7,))
        undeclared = nn.Module()
        undeclared.weight = place(nn.Parameter(torch.ones(2 + at)), {tensor: Shard(0)})
        clash = nn.Linear(2, 2)  # the same names on both stages
        odd = nn.Module()
        odd.weight = place(nn.Parameter(torch.ones(2, 2)), {tensor: Shard(0)})
        optimizer = torch.optim.SGD(odd.parameters(), lr=1.0)
        optimizer.state[odd.weight]["rows"] = torch.ones(7)
        attempts = {
            "step": lambda: manager.save(rank // 2, plain),
            "extra": lambda: manager.save(1, plain, extra={"x": Broken() if rank == 3 else 1}),
            "kind": lambda: manager.save(1, plain, extra={"x": {1} if rank == 2 else 1}),
            "uneven": lambda: manager.save(1, uneven if stage == 0 else plain),
            "undeclared": lambda: manager.save(1, undeclared if stage == 0 else plain),
            "clash": lambda: manager.save(1, clash),
            "rows": lambda: manager.save(1, odd if stage == 0 else plain, optimizer if stage == 0 else None),
            "nothing": lambda: manager.load(plain),
            "apart": lambda: CheckpointManager(folder / f"of rank {rank}", context).save(1, plain),
        }
        save._VISIBLE_WITHIN = 0.2
        told = []
        for attempt in attempts.values():
            try:
                attempt()
                told.append("no error")
            except CheckpointError as error:
                told.append(str(error))
        assert manager.steps() == []
        manager.save(1, plain)
        return told


def test_every_rank_raises_when_one_does_and_can_go_on(tmp_path):
    expected = [
        "ranks called save() with the different steps 0, 1. Call save() with the same step on every rank",
        "ValueError: out of order",
        "extra['x'] is a builtins.set",
        "its 2 shards have 2, 3",
        "ranks do not agree on weight",
        "Two stages use one name for different tensors",
        "state must have the shape of the parameter or one element",
        "has no checkpoint",
        "which rank 0 created. Use a folder on a file system that all ranks share",
    ]
    for told in run_world(4, meet_errors, tmp_path).values:
        assert len(told) == len(expected)
        for message, part in zip(told, expected, strict=True):
            assert part in message
