"""Metrics of a batch for the trainer's hooks: counts over its samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Accuracy(nn.Module):
    """The number of samples (or tokens) whose largest logit is at their label; labels of `ignore_index` do not count."""

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    @torch.no_grad()
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return ((logits.argmax(-1) == labels) & (labels != self.ignore_index)).sum()
