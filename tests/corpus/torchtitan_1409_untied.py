"""torchtitan #1409, #4486: the pipeline split made two weights out of a tied one.

Shows as: the first and the last stage learn on their own.
"""

from torch import nn

from tests.corpus.runner import TIED, Bug, Run

BUG = Bug(
    "torchtitan #1409, #4486",
    "splitting the model unties a tied weight",
    "tied-copy-missed",
    layout={"pipeline": 2},
    kind=TIED,
    settings={"num_microbatches": 2},
)


def plant(run: Run) -> None:
    def untied(context):
        model = TIED.model(context)
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return model

    run.model = untied
