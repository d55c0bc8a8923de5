"""The executor: runs the actions of one pipeline rank, one after another."""

from colonnade.engine.schedule.executor.call import call_module
from colonnade.engine.schedule.executor.executor import ExecutedStep, Executor
from colonnade.engine.schedule.executor.micro_batch import MicroBatch, cut_batch, join

__all__ = ["ExecutedStep", "Executor", "MicroBatch", "call_module", "cut_batch", "join"]
