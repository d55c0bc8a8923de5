"""Checksums of tensors by their bits: read once, on their device, with no wait of the host."""

from __future__ import annotations

import torch
from torch import Tensor

_AT_ONCE = 1 << 24
"""Words that are squared at a time on an accelerator: that takes as much memory again."""


@torch.no_grad()
def words_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as numbers of 64 bits, with zeros behind them where they do not fill the last one."""
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8 or raw.numel() % 8:
        raw = torch.cat([raw, raw.new_zeros(-raw.numel() % 8)])
    return raw.view(torch.int64)


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Two numbers that follow from all bits: the sum of the words, which one changed word always changes, and of their squares."""
    words = words_of(tensor)
    if words.device.type == "cpu":
        return torch.stack([words.sum(), torch.dot(words, words)])
    squares = [(part * part).sum() for part in words.split(_AT_ONCE)]
    return torch.stack([words.sum(), torch.stack(squares).sum()])
