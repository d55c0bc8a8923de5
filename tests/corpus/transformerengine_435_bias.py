"""TransformerEngine #435: a bias of a layer on a share of the tokens missed its sum over the tensor ranks.

Shows as: the bias alone has a part of its gradient on each rank; the weight beside it is right.
"""

from tests.corpus.runner import SCATTERED, Bug, Run
from tests.corpus.unplaced import forgetting

BUG = Bug(
    "TransformerEngine #435",
    "a bias that sees some of the tokens is not all-reduced over the tensor ranks",
    "partial-gradient",
    layout={"tensor": 2},
    kind=SCATTERED,
)


def plant(run: Run) -> None:
    run.model = forgetting(run.model, "norm.bias")
