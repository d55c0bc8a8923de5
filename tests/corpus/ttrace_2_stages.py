"""TTrace (arXiv 2506.09280), existing bugs: the layers were divided among the stages wrongly, so another model was trained.

Shows as: the second layer comes before the first.
"""

from collections import OrderedDict

from torch import nn

from tests.corpus.runner import TIED, Bug, Run

BUG = Bug(
    "TTrace, existing bugs: stage division",
    "two layers are swapped between stages",
    "forward-differs",
    layout={"pipeline": 2},
    kind=TIED,
    settings={"num_microbatches": 2},
)


def plant(run: Run) -> None:
    right = run.model

    def other_order(context):
        built = dict(right(context).named_children())
        return nn.Sequential(OrderedDict((name, built[name]) for name in ("table", "second", "first", "head")))

    run.model = other_order
