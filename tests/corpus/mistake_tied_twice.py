"""Invented: two handlers know of the tied weight, and both sum it over its stages.

Shows as: the tied weight moves twice as far as the others.
"""

import torch.distributed as dist

from tests.corpus.runner import TIED, Bug, Run

BUG = Bug(
    "invented: tied twice",
    "a tied weight is all-reduced over its stages twice",
    "reduced-twice",
    layout={"pipeline": 2},
    kind=TIED,
    settings={"num_microbatches": 2},
)


def plant(run: Run) -> None:
    def again(name, gradient, context):
        if name in ("table.weight", "head.weight"):
            dist.all_reduce(gradient)

    run.after_sums(again)
