"""Invented: a handler sends the first rank's gradients to the others, as is right for weights at the start.

Shows as: replicas agree, and learn from the first rank's samples only.
"""

import torch.distributed as dist

from tests.corpus.runner import Bug, Run

BUG = Bug("invented: broadcast", "all ranks receive the gradients of the first data rank", "not-reduced")


def plant(run: Run) -> None:
    run.reduce_by(lambda name, gradient, context: dist.broadcast(gradient, 0))
