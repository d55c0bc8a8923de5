"""What an engine gives of its model as a whole: the weights at run time, and folders that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.checkpoint.collective import gather_json
from colonnade.checkpoint.whole import WholeTensors
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError
from colonnade.hf.lora import lora_layers, save_adapters
from colonnade.paths import local_path


class WholeWeights:
    """The part of `Engine` that gives weights away. All of it is collective over the world."""

    context: ParallelContext

    @property
    def model(self) -> nn.Module:
        raise NotImplementedError

    @property
    def optimizer(self) -> Any:
        raise NotImplementedError

    def full_state_dict(self, to: str | Path = "all", *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The whole weights and persistent buffers, on the CPU, whatever the layout; a tied weight under each name.

        `to="all"` gives them to every rank, `to="first"` to rank 0 alone: elsewhere the dict is empty. Any other text is
        the safetensors file to write, one tensor at a time, and the dict is empty everywhere. With `dtype`, floating point
        tensors have that type. A plain model takes them by `load_state_dict`, unless its modules have extra state.
        """
        if (
            to not in ("all", "first")
            and local_path(to, "the file of engine.full_state_dict()", CheckpointError).suffix != ".safetensors"
        ):
            raise CheckpointError(f"to is 'all', 'first' or the name of a .safetensors file to write, not {str(to)!r}")
        with self.context.waits.together("engine.full_state_dict()"):
            return self._full_state_dict(to, dtype)

    def _full_state_dict(self, to: str | Path, dtype: torch.dtype | None) -> dict[str, Tensor]:
        self.wait_for_weights()
        whole = WholeTensors(self.model, self.context)
        if to not in ("all", "first"):
            from colonnade.checkpoint.pretrained import save_full

            save_full(whole, to, self.context, dtype)
            return {}
        found: dict[str, Tensor] = {}
        for record in whole.records:
            value = whole.gather(record) if to == "all" else whole.gather_apart([(record, 0)])
            if value is not None:
                value = value.to(dtype) if dtype is not None and value.is_floating_point() else value
                found |= dict.fromkeys(record.names, value)
        return found

    def save_pretrained(
        self, folder: str | Path, *, max_shard_size: int | str | None = None, dtype: torch.dtype | None = None
    ) -> Path:
        """Write the folder that `from_pretrained`, transformers' and ours, loads bit for bit: weights, index, configs.

        All ranks write, each some of the files, and none holds more than one whole tensor at a time. The folder appears when
        all of it is on disk, or its files take the place of earlier ones; what else lies there stays as it is.
        `max_shard_size` ("5GB") is the size of a file; without it there is one for each rank, of 64 MiB to 5 GB.
        Of a model with LoRA adapters it is the folder that peft loads: the adapters and their config alone.
        """
        from colonnade.checkpoint.pretrained import save_pretrained

        with self.context.waits.together("engine.save_pretrained()"):
            self.wait_for_weights()
            # Asked of all: some stages of a pipeline may have no adapters.
            if any(gather_json(any(True for _ in lora_layers(self.model)), self.context)):
                return save_adapters(self.model, folder, self.context, dtype)
            return save_pretrained(self.model, folder, self.context, max_shard_size, dtype)

    def wait_for_weights(self) -> None:
        """Every parameter is whole when this returns: with ZeRO's `gather_ahead` slices of the last step may be on their way."""
        if hasattr(self.optimizer, "wait"):
            self.optimizer.wait()
