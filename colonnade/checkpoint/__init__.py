"""Checkpoints that stay intact if the job is killed at any moment, and that can be loaded on another layout.

The modules, in reading order:

- `manager`: the public class; `save`: all steps of a save; `load`: all steps of a load.
- `manifest` defines the format; `tensor_files` and `values` write and read the files.
- `storage` has the renames, syncs and the lock of a run's folder; `optimizer_state` keys optimizer state by parameter name.
- `full_weights` writes folders of full tensors, and gathers full tensors during training.
- `export` converts from and to other formats. Decision 0008 gives the reasons for a separate format.

Names are imported on first use, so that checkpoints can be listed and verified without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from colonnade._imports import lazy_names

if TYPE_CHECKING:
    from colonnade.checkpoint.export import export_checkpoint as export_checkpoint
    from colonnade.checkpoint.export import export_full as export_full
    from colonnade.checkpoint.export import import_checkpoint as import_checkpoint
    from colonnade.checkpoint.load import LoadedInfo as LoadedInfo
    from colonnade.checkpoint.manager import CheckpointManager as CheckpointManager
    from colonnade.checkpoint.storage import verify as verify

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "colonnade.checkpoint.export": "export_checkpoint export_full import_checkpoint",
        "colonnade.checkpoint.load": "LoadedInfo",
        "colonnade.checkpoint.manager": "CheckpointManager",
        "colonnade.checkpoint.storage": "verify",
    },
)
