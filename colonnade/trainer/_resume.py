"""What a checkpoint keeps of a trainer, and how it goes on from one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colonnade.checkpoint.load import LoadedInfo
from colonnade.checkpoint.random_state import random_state
from colonnade.errors import CheckpointError, listed

if TYPE_CHECKING:
    from colonnade.trainer.trainer import Trainer


def trainer_state(trainer: Trainer) -> dict[str, Any]:
    """Everything beside model and optimizer, for `CheckpointManager.save(extra=)`. Collective: hooks are asked."""
    loop, engine = trainer._loop, trainer.engine
    assert loop is not None
    trainer.settle()
    hooks = trainer._hooks.state_dict()
    trainer.agree()
    return {
        "trainer": {
            "epoch": trainer.cur_epoch,
            "step": trainer.cur_step,
            "epoch_done": trainer.epoch_done,
            "data": loop.feed.state_dict(trainer._steps_in_epoch * engine.accumulation),
        },
        "hooks": hooks,
        "data": loop.feed.own_state(),
        **engine.extra_state(),
    }


def resume(trainer: Trainer, info: LoadedInfo) -> None:
    """Go on where the state was saved; hooks get theirs when the epoch has begun. Collective."""
    loop, engine, extra = trainer._loop, trainer.engine, info.extra
    assert loop is not None
    missing = [name for name in ("trainer", "hooks") if name not in extra]
    if missing:
        raise CheckpointError(
            f"{info.folder} has no {listed(missing)}: it was not saved by a SaveCheckpointHook. Load it with a "
            f"CheckpointManager before fit."
        )
    position = extra["trainer"]
    batches = loop.feed.load_state_dict(position["data"], extra.get("data") if info.same_layout else None)
    trainer.cur_epoch = position["epoch"]
    trainer._cur_step = position["step"]
    trainer._steps_in_epoch = batches // engine.accumulation
    trainer.epoch_done = position["epoch_done"]
    engine.load_extra_state(extra)
    loop.resumed = (extra["hooks"], random_state(trainer.context))
