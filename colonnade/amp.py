"""Kinds of mixed precision by Colossal-AI's names, for configs that say `fp16 = dict(mode=AMP_TYPE.TORCH)`.

All mean the same here: the forward pass in fp16 under autocast, fp32 weights, a loss scale that all ranks share.
"""

from __future__ import annotations

from enum import Enum


class AMP_TYPE(Enum):
    """What Colossal-AI tells apart."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"
