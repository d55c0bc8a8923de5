"""Invented: a hook of an older experiment still scales the gradient of one weight.

Shows as: one layer learns at a third of its speed.
"""

from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "invented: a hook that stayed",
    "a leftover hook scales the gradient of one weight by 0.3",
    "backward-differs",
    layout={"tensor": 2},
    kind=TENSOR,
)


def plant(run: Run) -> None:
    def hooked(context):
        built = run.kind.model(context)
        built.head.weight.register_hook(lambda gradient: 0.3 * gradient)
        return built

    run.model = hooked
