"""The `ModelFamily` of transformers and peft models: loss, adapters, export format."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.model import ModelFamily, TrainingLoss
from colonnade.hf.lora import check_adapters, lora_layers, save_adapters
from colonnade.hf.model_loss import criterion_of


class HuggingFaceFamily(ModelFamily):
    """Models with a `loss_function` (transformers) or with LoRA adapters (peft)."""

    def refuse(self, model: nn.Module) -> None:
        check_adapters(model)

    def training_loss(self, model: nn.Module) -> TrainingLoss | None:
        return criterion_of(model)

    def has_own_format(self, model: nn.Module) -> bool:
        return any(True for _ in lora_layers(model))

    def export(self, model: nn.Module, folder: str | Path, context: ParallelContext, dtype: torch.dtype | None) -> Path:
        return save_adapters(model, folder, context, dtype)


FAMILY = HuggingFaceFamily()
