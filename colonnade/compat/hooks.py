"""Trainer hooks whose arguments have the names that Colossal-AI gives them."""

from __future__ import annotations

from typing import Any

from colonnade.trainer import hooks


class SaveCheckpointHook(hooks.SaveCheckpointHook):
    def __init__(
        self,
        interval: int = 1,
        checkpoint_dir: str = "checkpoints",
        model: Any = None,
        save_by_iter: bool = False,
        priority: int = 100,
        **options: Any,
    ) -> None:
        folder = options.pop("folder", checkpoint_dir)
        super().__init__(interval, folder, model, **{"by_epoch": not save_by_iter, "priority": priority, **options})


class LoadCheckpointHook(hooks.LoadCheckpointHook):
    def __init__(self, checkpoint_dir: str = "checkpoints", *args: Any, **options: Any) -> None:
        super().__init__(options.pop("folder", checkpoint_dir), *args, **options)


class TensorboardHook(hooks.TensorBoardHook):
    def __init__(self, log_dir: str, *args: Any, **options: Any) -> None:
        super().__init__(log_dir, *args, **options)
