"""Many numbers as one, for comparisons between ranks."""

from __future__ import annotations

import torch
from torch import Tensor


def ordered_sum(numbers: Tensor) -> Tensor:
    """One number (of 64 bits, as all of them) that another order gives another of; one changed number always changes it."""
    factors = torch.arange(len(numbers), device=numbers.device) * 0x9E3779B97F4A7C1
    return ((factors ^ factors >> 29 | 1) * numbers).sum()
