"""Models to learn from and to test with, each written once: the config alone says how they are split."""

from __future__ import annotations

from colonnade.models.gpt import GPT, LanguageModelLoss
from colonnade.models.llama import Llama
from colonnade.models.moe_gpt import MoEGPT, MoELoss
from colonnade.models.vit import ViT

__all__ = ["GPT", "LanguageModelLoss", "Llama", "MoEGPT", "MoELoss", "ViT"]
