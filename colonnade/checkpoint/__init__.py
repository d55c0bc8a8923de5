"""Checkpoints that survive a kill at any moment and resume on another layout: written from placements, verified on load.

Begin with `manager`. `save` is the whole save (`save_plan` decides which rank writes which tensors), `load` the whole load.
`manifest` has the format, `tensor_files` and `values` write and read the files, `storage` has the folder of a run with its
renames, syncs and lock, and `optimizer_state` has the state of an optimizer by parameter names. `full_weights` gathers whole tensors while training; `export`,
`weights_folder` and `dcp` know other formats. Decision 0008 says why the format is our own.

Names are looked up on first use, so that checkpoints can be listed and verified without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from colonnade._lazy import lazy_names

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
