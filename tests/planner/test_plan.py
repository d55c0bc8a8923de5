"""Plans of jobs of any size, made in one process: groups, sums, memory, timelines, modes of one's own."""

from __future__ import annotations

from colonnade.parallel.collectives import all_reduce_of  # noqa: F401
