"""The save protocol: killed at any point it leaves a checkpoint that loads; in the background it behaves the same."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colonnade.checkpoint import CheckpointManager, save, storage
from colonnade.checkpoint import storage as verify_module
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError
from colonnade.testing import run_world
from tests.checkpoint.models import WAYS, launched
from tests.ranks import on_ranks


def model_at(step: int, size: int = 6) -> nn.Module:
    """A model whose weights are all its step."""
    model = nn.Linear(size, size)
    for parameter in model.parameters():
        nn.init.constant_(parameter, step)
    return model


def loaded(folder: Path) -> tuple[int, float]:
    """The step and the weights of the newest good checkpoint, as a new run sees it; saving must work too."""
    model = model_at(-1)
    with CheckpointManager(folder, ParallelContext(), keep=2) as manager:
        info = manager.load(model)
        assert info.skipped == ()
        manager.save(info.step + 100, model)
    assert not [path for path in folder.iterdir() if path.name.startswith(".tmp")]
    assert torch.equal(model.weight, torch.full_like(model.weight, model.weight[0, 0].item()))
    return info.step, model.weight[0, 0].item()


class Kill:
    """Kills its process when the protocol passes a point for the n-th time."""

    def __init__(self, point: str, times: int = 1) -> None:
        self.point, self.left = point, times

    def __call__(self, point: str) -> None:
        self.left -= point == self.point
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def save_until_killed(folder: Path, point: str, victim: int, background: bool) -> None:
    with launched(WAYS["data 2"]) as context:
        manager = CheckpointManager(folder, context, keep=2, background=background)
        for step in (1, 2, 3):
            manager.wait()
            if step == 3 and context.get_global_rank() == victim:
                storage.hook = Kill(point)
            manager.save(step, model_at(step))
        manager.close()


SOURCE = "".join(path.read_text() for path in sorted(Path(storage.__file__).parent.rglob("*.py")))
OF_FOLDERS = {"files written", "head aside", "old ones aside", "files placed", "heads placed"}
"""Points that only folders for others have: test_exchange.py kills there."""
POINTS = sorted(set(re.findall(r'fault_point\("(.+?)"\)', SOURCE)) - OF_FOLDERS)
AFTER_RENAME = ("renamed", "parent synced", "retired")


def test_every_step_of_the_protocol_is_a_point():
    assert len(POINTS) == 10
    assert set(AFTER_RENAME) < set(POINTS)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_leaves_the_last_or_the_new_checkpoint(tmp_path, point):
    result = run_world(2, save_until_killed, tmp_path, point, 0, False, check=False)
    assert result.outcomes[0].signal == "SIGKILL"
    expected = 3 if point in AFTER_RENAME else 2
    assert loaded(tmp_path) == (expected, expected)


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["now", "background"])
@pytest.mark.parametrize("point", ["tensor written", "file written", "file synced", "part written"])
def test_a_kill_of_another_rank_leaves_the_last_checkpoint(tmp_path, point, background):
    # In the background the first rank waits for the killed one's note; it need not, once its main thread has failed.
    result = run_world(2, save_until_killed, tmp_path, point, 1, background, check=False)
    assert result.outcomes[1].signal == "SIGKILL"
    assert loaded(tmp_path)[0] in ((2, 3) if background and point == "part written" else (2,))


def save_for_ever(folder: Path, delay: float, victim: int, background: bool) -> None:
    with launched(WAYS["data 2"]) as context:
        manager = CheckpointManager(folder, context, keep=2, background=background)
        manager.save(1, model_at(1, 6))
        manager.wait()
        if context.get_global_rank() == victim:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        for step in range(2, 100_000):
            manager.save(step, model_at(step))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [15, pytest.param(50, marks=pytest.mark.long)])
def test_kills_at_random_moments_of_a_loop_of_saves(tmp_path, kills):
    pick = random.Random(0)
    for trial in range(kills):
        folder = tmp_path / str(trial)
        victim, background = pick.randrange(2), pick.random() < 0.5
        result = run_world(2, save_for_ever, folder, pick.uniform(0, 0.3), victim, background, check=False)
        assert result.outcomes[victim].signal == "SIGKILL"
        step, weight = loaded(folder)
        assert step == weight >= 1


# -- in the background ------------------------------------------------------------------------------------


@on_ranks(2)
def test_training_goes_on_while_the_copy_is_written(tmp_path: Path):
    """Change the weights right after save returned; count what the training thread could do meanwhile."""
    with launched(WAYS["data 2"]) as context, CheckpointManager(tmp_path, context, background=True) as manager:
        go = threading.Event()
        storage.hook = lambda point: go.wait(20) if point == "tensor written" else None
        model = model_at(1)
        manager.save(1, model)
        before = manager.steps()
        for parameter in model.parameters():
            nn.init.constant_(parameter, 77)
        torch.distributed.all_reduce(torch.ones(1))  # training's own groups are free
        go.set()
        manager.wait()
        info = manager.load(model)
        seen = [before, info.step, model.weight.unique().tolist()]
    assert seen == [[], 1, [1.0]]


def fail_in_the_background(folder: Path, rank: int, then: str) -> list[Any]:
    with launched(WAYS["data 2"]) as context:
        manager = CheckpointManager(folder, context, background=True)
        manager.save(1, model_at(1))
        manager.wait()

        def full(point: str) -> None:
            if point == "tensor written" and context.get_global_rank() == rank:
                raise OSError(errno.ENOSPC, "No space left on device")

        storage.hook = full
        manager.save(2, model_at(2))
        try:
            {
                "close": manager.close,
                "save": lambda: manager.save(3, model_at(3)),
                "load": lambda: manager.load(model_at(0)),
            }[then]()
        except CheckpointError as error:
            left = sorted(path.name for path in folder.iterdir() if not path.name.startswith("run"))
            return [str(error), left]
        return ["no error"]


@pytest.mark.parametrize(("rank", "then"), [(0, "save"), (1, "close"), (1, "load")])
def test_an_error_in_the_background_is_raised_on_every_rank_at_the_next_call(tmp_path, rank, then):
    for message, left in run_world(2, fail_in_the_background, tmp_path, rank, then).values:
        assert "no space for the checkpoint" in message
        assert left == ["step-00000001"]


def test_a_process_that_ends_without_close_ends_after_its_last_checkpoint(tmp_path):
    run_world(2, leave_without_close, tmp_path)
    deadline = time.monotonic() + 10
    while not (tmp_path / "step-00000001").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert loaded(tmp_path) == (1, 1)


def leave_without_close(folder: Path) -> None:
    with launched(WAYS["data 2"]) as context:
        CheckpointManager(folder, context, background=True).save(1, model_at(1))
        for thread in threading.enumerate():  # what the interpreter does at its end; the harness leaves faster
            if thread.name.startswith("colonnade-save"):
                assert not thread.daemon
                thread.join()


def fail_while_it_writes(folder: Path) -> float:
    """One rank raises inside the `with` while the other has not written its part: the save is soon given up."""
    with launched(WAYS["data 2"]) as context:
        if context.get_global_rank() == 1:
            storage.hook = lambda point: time.sleep(30)
        else:
            save._PATIENCE_AFTER_ERROR = 0.5
        began = time.monotonic()
        try:
            with CheckpointManager(folder, context, background=True) as manager:
                manager.save(1, model_at(1))
                raise ValueError("the user's own")
        except ValueError:
            threads = [thread for thread in threading.enumerate() if thread.name.startswith("colonnade-save")]
            for thread in threads if context.get_global_rank() == 0 else []:
                thread.join()
        return time.monotonic() - began


def test_a_rank_that_fails_does_not_wait_for_the_others(tmp_path):
    assert run_world(2, fail_while_it_writes, tmp_path).values[0] < 10
    assert not (tmp_path / "step-00000001").exists()


# -- what may go wrong ------------------------------------------------------------------------------------


def raise_at(point: str, error: OSError) -> Any:
    def hook(passed: str) -> None:
        if passed == point:
            raise error

    return hook


@pytest.mark.parametrize(
    "point", ["tensor written", "file synced", "part written", "manifest written", "folder synced"]
)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failed_save_harms_nothing(tmp_path, monkeypatch, point, code):
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        manager.save(1, model_at(1))
        before = {path: path.read_bytes() for path in (tmp_path / "step-00000001").iterdir()}
        monkeypatch.setattr(storage, "hook", raise_at(point, OSError(code, os.strerror(code))))
        full = code != errno.EIO and point not in ("part written",)
        with pytest.raises(
            CheckpointError,
            match=r"1\.1 MB are needed, .* MB are free\. .* \(.*\)" if full else "saving step 2: OSError",
        ):
            manager.save(2, model_at(2))
        assert {path: path.read_bytes() for path in (tmp_path / "step-00000001").iterdir()} == before
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")] == []
        monkeypatch.setattr(storage, "hook", None)
        manager.save(2, model_at(2))
        assert manager.steps() == [1, 2]


def test_what_could_not_be_loaded_is_not_published_and_older_checkpoints_stay(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path, ParallelContext(), keep=1) as manager:
        manager.save(1, model_at(1))
        with monkeypatch.context() as patched:
            patched.setattr(verify_module, "_LONGEST", 100)
            with pytest.raises(CheckpointError, match=r"step 2 was written but failed verification: .* 100 bytes"):
                manager.save(2, model_at(2))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run.lock", "step-00000001"]
        manager.save(2, model_at(2))
        assert manager.steps() == [2]
