"""The life cycle of hooks: order, priorities, configs, and what happens when one raises."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.checkpoint import CheckpointManager
from colonnade.constants import SAVED
from colonnade.errors import ConfigError, HookError, RegistryError
from colonnade.registry import HOOKS
from colonnade.testing import run_world
from colonnade.trainer import BaseHook, Trainer
from colonnade.trainer.hooks import EarlyStopHook, LoadCheckpointHook, LossHook, LRSchedulerHook, SaveCheckpointHook
from colonnade.trainer.hooks.hook import POINTS, build_hook
from tests.trainer.runs import PIPELINE, cut, make_trainer, run_each

HEARD: list[str] = []


class Listener(BaseHook):
    """Writes down when it is called."""

    def __init__(self, name: str, priority: int = 10) -> None:
        super().__init__(priority)
        self.name = name

    def close(self) -> None:
        HEARD.append(f"{self.name} close")


def _heard(point: str) -> Any:
    return lambda self, trainer, *args: HEARD.append(f"{self.name} {point}")


for _point in POINTS:
    setattr(Listener, _point, _heard(_point))


class Failing(BaseHook):
    """Raises at one point on one rank."""

    def __init__(self, point: str, rank: int, step: int = 2) -> None:
        super().__init__()
        setattr(self, point, self._fail)
        self._rank, self._step = rank, step
        self.closed = False
        self.raised = 0

    def _fail(self, trainer: Trainer, *args: Any) -> None:
        if trainer.context.get_global_rank() == self._rank and trainer.cur_step >= self._step:
            self.raised += 1
            raise ValueError("out of coffee")

    def close(self) -> None:
        self.closed = True


def order() -> list[str]:
    HEARD.clear()
    trainer = make_trainer({})
    batches = cut(range(8), 8)
    hooks = [Listener("late", 20), Listener("first", -1), Listener("tie a"), Listener("tie b")]
    trainer.fit(batches, epochs=1, test_dataloader=batches[:1], hooks=hooks)
    assert [hook.name for hook in trainer.hooks] == ["first", "tie a", "tie b", "late"]  # type: ignore[attr-defined]
    trainer.context.destroy()
    return list(HEARD)


def test_hooks_are_called_in_the_order_of_their_priority_along_the_life_cycle():
    heard = order()
    life = [entry.removeprefix("first ") for entry in heard if entry.startswith("first ")]
    assert life == [
        "after_hook_is_attached",
        "before_train",
        "before_train_epoch",
        "before_train_iter",
        "after_train_iter",
        "on_record",
        "before_train_iter",
        "after_train_iter",
        "on_record",
        "after_train_epoch",
        "before_test",
        "before_test_epoch",
        "before_test_iter",
        "after_test_iter",
        "after_test_epoch",
        "after_test",
        "after_train",
        "close",
    ]
    at_start = [entry.rpartition(" ")[0] for entry in heard if entry.endswith("before_train")]
    assert at_start == ["first", "tie a", "tie b", "late"]


def failing(config: dict[str, Any], point: str, rank: int, step: int) -> dict[str, Any]:
    HEARD.clear()
    trainer = make_trainer(config)
    batches = cut(range(24), 24)
    hook = Failing(point, rank, step)
    loss = LossHook()
    try:
        trainer.fit(batches, epochs=2, test_dataloader=batches[:3], hooks=[hook, Listener("other"), loss])
    except HookError as error:
        told = str(error)
    assert hook.closed
    assert hook.raised == (trainer.context.get_global_rank() == rank)  # not called again
    loss.state_dict()  # collective, and intact: the ranks still move together
    trainer.context.destroy()
    return {"told": told, "heard": HEARD[-2:], "step": trainer.cur_step}


FAILURES: dict[str, tuple[int, int]] = {
    "before_train": (0, 0),
    "before_train_epoch": (0, 0),
    "before_train_iter": (2, 3),
    "after_train_iter": (2, 2),
    "on_record": (2, 3),
    "after_train_epoch": (2, 6),
    "after_test_iter": (2, 6),
}
"""By point: from which step on it fails, and how many steps the run has then."""


def test_the_error_of_a_hook_is_raised_on_every_rank():
    cases = [({}, point, 1, step) for point, (step, _) in FAILURES.items()]
    for rank, told in enumerate(run_world(2, run_each, failing, cases, timeout=110).values):
        for (point, (_, steps)), found in zip(FAILURES.items(), told, strict=True):
            assert f"hook Failing failed in {point}" in found["told"]
            assert "ValueError: out of coffee" in found["told"]
            assert ("on rank 1" in found["told"]) == (rank == 0)
            assert found["heard"] == ["other after_train", "other close"]
            assert found["step"] == steps, point


def test_the_error_of_a_hook_of_one_stage_reaches_the_other_and_one_at_the_start_begins_nothing():
    cases = [(PIPELINE, "after_train_iter", 0, 2), ({}, "after_hook_is_attached", 0, 0)]
    for of_stage, at_start in run_world(2, run_each, failing, cases).values:
        assert "hook Failing failed in after_train_iter" in of_stage["told"]
        assert of_stage["step"] == 2
        assert "hook Failing failed in after_hook_is_attached" in at_start["told"]
        assert at_start["heard"] == ["other after_hook_is_attached", "other close"]
        assert at_start["step"] == 0


def test_hooks_come_from_configs():
    hook = build_hook({"type": "LossHook", "priority": 3})
    assert isinstance(hook, LossHook)
    assert hook.priority == 3
    with pytest.raises(RegistryError, match="Did you mean 'LossHook'"):
        build_hook({"type": "LosHook"})
    with pytest.raises(ConfigError, match="LRSchedulerHook cannot be built"):
        build_hook({"type": "LRSchedulerHook"})
    with pytest.raises(ConfigError, match="dict"):
        build_hook({"priority": 3})
    with pytest.raises(ConfigError, match="a hook must be an object that inherits BaseHook"):
        build_hook(LRSchedulerHook)  # type: ignore[arg-type]


def test_every_built_in_hook_is_registered_under_its_name():
    from colonnade.trainer import hooks

    bases = {"BaseHook", "LogByEpochHook"}
    for name in set(hooks.__all__) - bases:
        assert HOOKS.get_module(name) is getattr(hooks, name)


class Stateless(BaseHook):
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no state today")


def test_a_run_that_fails_closes_the_checkpoints_of_its_hook(tmp_path):
    trainer = make_trainer({})
    hook = SaveCheckpointHook(1, tmp_path, by_epoch=False, background=True)
    with pytest.raises(HookError, match="Failing"):
        trainer.fit(cut(range(24), 24), epochs=1, hooks=[hook, Failing("after_train_iter", 0, 1)])
    assert hook._manager is None
    told = "hook Stateless failed in state_dict .*no state today"
    with pytest.raises(HookError, match=told):
        trainer.fit(cut(range(24), 24), epochs=9, hooks=[SaveCheckpointHook(1, tmp_path, by_epoch=False), Stateless()])
    with CheckpointManager(tmp_path, trainer.context):  # nobody else holds the folder
        pass
    trainer.context.destroy()


def _state_of(trainer: Trainer) -> list[Any]:
    optimizer, engine = trainer.engine.optimizer, trainer.engine
    state = [*engine.model.state_dict().values(), *(kept["momentum_buffer"] for kept in optimizer.state.values())]
    clip = engine.extra_state()["engine.clip"]
    return [tensor.tolist() for tensor in (*state, *clip["state"].values())]


def test_a_checkpoint_that_the_trainer_refuses_changes_nothing(tmp_path):
    """Of checkpoints that the trainer does not take: weights, momentum and the history of clipping stay as they are."""
    sgd = partial(torch.optim.SGD, momentum=0.9)
    saved = make_trainer({"clip_grad_norm": {"method": "zclip"}}, lr=0.1, optimizer=sgd)
    saved.fit(cut(range(24), 24), epochs=1, hooks=[SaveCheckpointHook(100, tmp_path / "zclip", by_epoch=False)])
    with CheckpointManager(tmp_path / "plain", saved.context) as manager:
        manager.save(1, saved.engine.model, saved.engine.optimizer)
    saved.context.destroy()
    trainer = make_trainer({"clip_grad_norm": {"method": "percentile"}}, lr=0.1, optimizer=sgd)
    trainer.fit(cut(range(8), 24), epochs=1)
    before, place = _state_of(trainer), (trainer.cur_epoch, trainer.cur_step)
    for name, told in (("zclip", "the clip state was saved by ZClip"), ("plain", "no SaveCheckpointHook saved it")):
        with pytest.raises(HookError, match=told):
            trainer.fit(cut(range(8), 24), epochs=9, hooks=[LoadCheckpointHook(tmp_path / name)])
        assert _state_of(trainer) == before, name
        assert (trainer.cur_epoch, trainer.cur_step) == place
    trainer.context.destroy()


def _noted(folder: Path) -> list[str]:
    """What the launcher is told is newest: after a save, and in a run that goes on from there and has saved nothing yet."""
    note = folder / "note"
    told = []
    for hook in (SaveCheckpointHook(1, folder / "run", by_epoch=False), LoadCheckpointHook(folder / "run")):
        note.unlink(missing_ok=True)
        trainer = make_trainer({})
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(SAVED, str(note))
            trainer.fit(cut(range(24), 24), max_steps=2, hooks=[hook])
        told.append(note.read_text())
        trainer.context.destroy()
    note.unlink()
    trainer = make_trainer({})
    with pytest.MonkeyPatch.context() as patch, CheckpointManager(folder / "own", trainer.context) as manager:
        patch.setenv(SAVED, str(note))
        manager.save(3, trainer.engine.model, trainer.engine.optimizer, {"epoch": 1})
    told.append(note.read_text())
    trainer.context.destroy()
    return told


def test_a_run_that_goes_on_tells_the_launcher_from_where(tmp_path):
    saved, loaded, own = _noted(tmp_path)
    folder = tmp_path / "run" / "step-00000002"
    assert saved == loaded == f"step 2 in {folder}; a run with a LoadCheckpointHook resumes from it"
    assert own.startswith(f"step 3 in {tmp_path / 'own' / 'step-00000003'}; a loop that calls CheckpointManager.load()")
    assert "Hook" not in own


@pytest.mark.parametrize(
    ("mode", "higher", "best", "value", "is_better"),
    [
        (None, False, 5.0, 4.0, True),
        (None, False, 5.0, 4.5, False),  # not by more than min_delta
        (None, False, 5.0, 6.0, False),
        (None, False, -5.0, -6.0, True),
        (None, True, 5.0, 6.0, True),
        (None, True, 5.0, 4.0, False),
        (None, True, -5.0, -4.0, True),
        ("min", True, 5.0, 4.0, True),
        ("max", False, 5.0, 4.0, False),
        (None, False, None, 9.0, True),
        (None, False, None, float("nan"), False),
        (None, False, 5.0, float("nan"), False),
    ],
)
def test_what_an_early_stop_takes_for_better(mode, higher, best, value, is_better):
    hook = EarlyStopHook(mode=mode, min_delta=0.5)
    hook.best = best
    assert hook._is_better(value, higher) is is_better


def test_an_early_stop_waits_for_so_many_epochs_and_goes_on_where_it_was():
    said: list[str] = []
    numbers = iter([5.0, 4.0, 4.0, 3.0, 3.5, 3.0, 3.0])
    loss = SimpleNamespace(get_accumulated_value=lambda: next(numbers), higher_is_better=False)
    trainer: Any = SimpleNamespace(
        states={"metrics": {"test": {"Loss": loss}}}, request_stop=said.append, is_fitting=True
    )
    hook = EarlyStopHook(patience=2)
    for _ in range(6):
        hook.after_test_epoch(trainer)
    assert said == []
    resumed = EarlyStopHook(patience=2)
    resumed.load_state_dict(hook.state_dict())
    trainer.is_fitting = False
    resumed.after_test_epoch(trainer)  # an evaluation by hand is no epoch
    trainer.is_fitting = True
    resumed.after_test_epoch(trainer)
    assert said == ["test Loss has not improved for 3 epochs; best: 3"]
    once = EarlyStopHook(patience=0, on="train")
    loss.get_accumulated_value = lambda: 1.0
    trainer = SimpleNamespace(states={"metrics": {"train": {"Loss": loss}}}, request_stop=said.append, epoch_done=False)
    once.after_train_epoch(trainer)  # it was left in the middle
    once.after_test_epoch(trainer)  # nor what it is about
    assert once.best is None
    trainer.epoch_done = True
    once.after_train_epoch(trainer)
    assert (once.best, len(said)) == (1.0, 1)
    once.after_train_epoch(trainer)
    assert len(said) == 2
    for wrong in ({"mode": "low"}, {"on": "both"}, {"patience": -1}):
        with pytest.raises(ConfigError, match="EarlyStopHook"):
            EarlyStopHook(**wrong)
    assert EarlyStopHook(patience=0).state_dict() == {"best": None, "waited": 0}
