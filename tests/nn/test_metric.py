"""Measures of a batch."""

from __future__ import annotations

import torch

from colonnade.nn.layer.cross_entropy import Accuracy


def test_accuracy_counts_what_is_right_and_passes_over_what_is_ignored():
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    assert Accuracy()(logits, torch.tensor([1, 0, 0, -100])).item() == 2
    assert Accuracy(ignore_index=0)(logits, torch.tensor([1, 0, 0, 1])).item() == 1
