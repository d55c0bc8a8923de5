"""lightly #1920: a loss over everybody's outputs, through which each rank's gradient flows to its own only, averaged by DDP.

Shows as: gradients that are 1/world of the true ones; the loss is right.
"""

from colonnade import ParallelMode
from colonnade.parallel.collectives import gather
from tests.corpus.runner import MLP, Bug, Kind, Run


class Spread:
    """How far the mean of all outputs is from zero: no mean of the ranks' own."""

    def __init__(self, context):
        self.context = context

    def __call__(self, out, label):
        return gather(out, ParallelMode.DATA, 0, context=self.context).mean(0).square().sum()


BUG = Bug(
    "lightly #1920",
    "partial gradients of a loss over all ranks' outputs are averaged",
    "averaged-not-summed",
    kind=Kind(MLP.model, Spread),
)


def plant(run: Run) -> None:
    """The loss is what is wrong: it owes a sum, and gets the mean that every loss gets."""
