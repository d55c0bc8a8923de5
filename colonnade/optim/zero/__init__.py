"""ZeRO: optimizer state (stage 1), gradients (2) and parameters (3) sharded over the ranks with distinct data."""

from colonnade.config.settings import ZeroSettings
from colonnade.optim.zero.zero_optimizer import ZeroOptimizer

__all__ = ["ZeroOptimizer", "ZeroSettings"]
