"""gpt-neox #1259: norms that see a share of the tokens were not all-reduced over the model-parallel ranks.

Shows as: the norm's gradient on each tensor rank is that of its own tokens.
"""

from tests.corpus.runner import SCATTERED, Bug, Run
from tests.corpus.unplaced import forgetting

BUG = Bug(
    "gpt-neox #1259",
    "a LayerNorm that sees some of the tokens is not all-reduced over the tensor ranks",
    "partial-gradient",
    layout={"tensor": 2},
    kind=SCATTERED,
)


def plant(run: Run) -> None:
    run.model = forgetting(run.model, "norm")
