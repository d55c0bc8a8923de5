"""The same on a pipeline of two stages, each of them on two ranks."""

from config import *  # noqa: F403

parallel = dict(pipeline=2, tensor=dict(size=2, mode="1d"))
schedule = dict(type="OneFOneB", num_microbatches=4)
