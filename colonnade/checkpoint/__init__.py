"""Checkpoints that survive a kill at any moment and resume on another layout: written from placements, verified on load.

`manager` is the entrance: `save` tells a save from top to bottom (`save_plan`: who writes what), `load` a load. `manifest` is the
format, `tensor_files` and `values` what its files hold, `storage` the folder of a run with its renames, syncs and lock, and
`optimizer_state` an optimizer's state by names of parameters. `full_weights` gathers whole tensors while training; `export`,
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
