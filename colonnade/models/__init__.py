"""Example models for every parallel layout; the config determines how they are sharded."""

from __future__ import annotations

from colonnade.models.gpt import GPT, LanguageModelLoss
from colonnade.models.llama import Llama
from colonnade.models.moe_gpt import MoEGPT, MoELoss
from colonnade.models.vit import ViT

__all__ = ["GPT", "LanguageModelLoss", "Llama", "MoEGPT", "MoELoss", "ViT"]
