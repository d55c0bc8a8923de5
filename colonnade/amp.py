"""Mixed-precision modes by the names of Colossal-AI, for configs with `fp16 = dict(mode=AMP_TYPE.TORCH)`.

In Colonnade all these modes mean the same: forward passes in fp16 autocast, fp32 weights, and one loss scale for all ranks.
"""

from __future__ import annotations

from enum import Enum


class AMP_TYPE(Enum):
    """The mixed-precision modes of Colossal-AI."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"
