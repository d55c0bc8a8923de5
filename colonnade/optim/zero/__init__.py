"""ZeRO: optimizer state (stage 1), gradients (2) and parameters (3) sharded over the ranks that see distinct data."""

from colonnade.optim.zero.optimizer import ZeroOptimizer
from colonnade.optim.zero.settings import ZeroSettings

__all__ = ["ZeroOptimizer", "ZeroSettings"]
