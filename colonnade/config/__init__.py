"""The config of a run: a `.py` or `.toml` file or a dict, checked completely when it is loaded. Imports no torch."""

from __future__ import annotations

from colonnade.config.config import Config, load_config
from colonnade.config.settings import AxisSpec, ParallelSizes, least_world, parallel_sizes

__all__ = ["AxisSpec", "Config", "ParallelSizes", "least_world", "load_config", "parallel_sizes"]
