"""Tensor parallelism 2 x pipeline 2: two pipeline stages with two tensor-parallel ranks each."""

from config import *  # noqa: F403

parallel = dict(pipeline=2, tensor=dict(size=2, mode="1d"))
schedule = dict(type="OneFOneB", num_microbatches=4)
