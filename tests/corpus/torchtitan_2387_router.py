"""torchtitan #2387, #2388: the router's weight was used as a local tensor, and its gradient taken for final.

Shows as: routers part after the first step, on each data rank alike.
"""

from tests.corpus.heads import Heads
from tests.corpus.runner import NORM, Bug, Kind, Run
from tests.corpus.unplaced import forgetting

BUG = Bug(
    "torchtitan #2387, #2388",
    "a weight that local heads use receives only their gradient",
    "partial-gradient",
    ranks=4,
    layout={"tensor": 2},
    kind=Kind(Heads),
    settings={"clip_grad_norm": NORM, "gradient_accumulation": 2},
)


def plant(run: Run) -> None:
    run.model = forgetting(run.model, "gain")
