"""Scripts on the Trainer of transformers, which trains through Accelerate (accelerate.py).

With `num_items_in_batch`, the Trainer divides the summed loss of each rank by the number of tokens of all ranks, and multiplies it by
the number of ranks, because DDP divides by it. The losses of the ranks therefore have the loss of the global batch as their mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colonnade.proof.frameworks import Replacement
    from colonnade.proof.script_job import ScriptRecorder


def replacements(script: ScriptRecorder) -> Iterator[Replacement]:
    """Yield the functions of the Trainer that are replaced under `verify`: it must not write checkpoints."""
    from transformers.trainer import Trainer

    if not script.part.keeps_checkpoints:
        yield Trainer, "_save_checkpoint", lambda own: lambda *args, **kwargs: None
        yield Trainer, "save_model", lambda own: lambda *args, **kwargs: None
